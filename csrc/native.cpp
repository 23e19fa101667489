// vllm_ext._C: compiled helpers for plain buffers, no torch.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "host_copy.h"

namespace py = pybind11;

namespace {

// Sums the bytes of any C-contiguous buffer without copying it; the interpreter lock is released meanwhile.
std::uint64_t sum_u8(const py::buffer& buffer) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
    throw py::error_already_set();
  }
  std::uint64_t total = 0;
  {
    py::gil_scoped_release unlocked;
    const auto* bytes = static_cast<const std::uint8_t*>(view.buf);
    for (Py_ssize_t i = 0; i < view.len; ++i) {
      total += bytes[i];
    }
  }
  PyBuffer_Release(&view);
  return total;
}

py::dict build_info() {
  py::dict info;
#if defined(__VERSION__)
  info["compiler"] = std::string(__VERSION__);
#else
  info["compiler"] = std::string("unknown");
#endif
  info["cpp_standard"] = static_cast<long>(__cplusplus);
  info["pybind11"] = std::string(PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(PYBIND11_VERSION_MINOR));
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled helpers of vllm-ext for plain buffers.";
  module.def("sum_u8", &sum_u8, py::arg("buffer"), "Sum of the bytes of a C-contiguous buffer.");
  vllm_ext::bind_host_copy(module);
  module.def("build_info", &build_info, "What this extension was built with.");
}
