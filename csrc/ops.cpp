// vllm_ext/_ops.so: torch ops on torch's stable ABI, so that one build serves every later torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace {

using torch::stable::Tensor;

// A smoke op: its result tells that the library was built, loaded and dispatched.
Tensor add_one(const Tensor& input) {
  STD_TORCH_CHECK(input.scalar_type() == torch::headeronly::ScalarType::Float,
                  "vllm_ext::add_one takes a float32 tensor; use vllm_ext.native.add_one for other types.");
  // input - (-1): subtraction is in the stable ABI since 2.10 and keeps shape and strides.
  Tensor minus_one = torch::stable::empty_like(input);
  torch::stable::fill_(minus_one, -1.0);
  return torch::stable::subtract(input, minus_one);
}

}  // namespace

STABLE_TORCH_LIBRARY(vllm_ext, library) {
  library.def("add_one(Tensor input) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_ext, CPU, library) {
  library.impl("add_one", TORCH_BOX(&add_one));
}
