"""What makes packages from the index importable on a machine without CUDA and RDMA."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_OPERATORS = """

# Appended for tests: the operators of the compiled library, which fits CUDA builds of torch alone.
# Nothing calls them; what follows in this package only describes them to the compiler.
for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
"""

# What Mooncake's engine asks of libibverbs.so.1, by version of the symbol.
_VERBS = {
    "IBVERBS_1.0": "create_comp_channel destroy_comp_channel",
    "IBVERBS_1.1": """ack_async_event ack_cq_events alloc_pd close_device create_cq create_qp
        dealloc_pd dereg_mr destroy_cq destroy_qp event_type_str fork_init free_device_list
        get_async_event get_cq_event get_device_list get_device_name modify_qp open_device
        query_device query_gid query_port query_qp reg_mr wc_status_str""",
    "IBVERBS_1.8": "reg_mr_iova2",
    "IBVERBS_1.11": "_query_gid_ex",
}


class AdaptationError(Exception):
    """A sentence for the user: what was found, what was expected, what to do."""


def adapt_torchvision(site: Path) -> None:
    """Declare the two operators without which torchvision can't be imported."""
    extension = site / "torchvision" / "extension.py"
    extension.write_text(extension.read_text() + _OPERATORS)


def adapt_mooncake(site: Path) -> None:
    """Put a verbs library without devices beside the engine: what is left to it is TCP."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise AdaptationError("There is no C compiler (cc, gcc) on PATH; install one, e.g. gcc.")
    (libraries,) = site.glob("mooncake*.libs")
    code, versions, base = "", "", ""
    for version, names in _VERBS.items():
        symbols = [n if n.startswith("_") else f"ibv_{n}" for n in names.split()]
        symbols = ["_ibv_query_gid_ex" if s == "_query_gid_ex" else s for s in symbols]
        code += "".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols)
        versions += f"{version} {{ global: {' '.join(f'{s};' for s in symbols)} }}{base};\n"
        base = f" {version}"
    source, script = libraries / "ibverbs.c", libraries / "ibverbs.map"
    source.write_text(code)
    script.write_text(versions)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"]
    command += [f"-Wl,--version-script={script}", "-o", str(libraries / "libibverbs.so.1")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AdaptationError(f"{compiler} could not build the verbs library:\n{done.stderr}")
