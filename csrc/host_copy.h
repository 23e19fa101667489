#pragma once

#include <pybind11/pybind11.h>

namespace vllm_ext {

// Adds copy_spans() to vllm_ext._C.
void bind_host_copy(pybind11::module_& module);

}  // namespace vllm_ext
