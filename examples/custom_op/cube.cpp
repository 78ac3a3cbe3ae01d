// The operation Cube of the domain com.acme: (x, bias) -> (x^3 + bias, x^3), with its gradient.
//
// poptorch.custom_op(..., "Cube", "com.acme", 1, ...) finds it as torch.ops.com_acme.Cube: dots of a domain become
// underscores. Loading the library is enough, because what TORCH_LIBRARY contains runs at that moment.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Pair = std::tuple<Tensor, Tensor>;

// What the operation computes.
Pair cube(const Tensor& x, const Tensor& bias) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "Cube takes float32, not ", x.scalar_type());
  Tensor input = x.contiguous();
  Tensor cubed = at::empty_like(input);
  const float* from = input.const_data_ptr<float>();
  float* to = cubed.mutable_data_ptr<float>();
  for (int64_t i = 0; i < input.numel(); ++i) {
    to[i] = from[i] * from[i] * from[i];
  }
  return {cubed + bias, cubed};
}

// What its results are like. It is used to compile models, where tensors have no values yet. Without it poptorch calls
// the operation once with zeros instead, and programs call it by way of Python.
Pair describe(const Tensor& x, const Tensor& bias) {
  return {at::empty_like(x, at::MemoryFormat::Contiguous), at::empty_like(x, at::MemoryFormat::Contiguous)};
}

Pair call(const Tensor& x, const Tensor& bias) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("com_acme::Cube", "").typed<Pair(const Tensor&, const Tensor&)>();
  return op.call(x, bias);
}

class Cube : public torch::autograd::Function<Cube> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, bias});
    auto [sum, cubed] = call(x, bias);
    return {sum, cubed};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    Tensor of_x = (gradients[0] + gradients[1]) * 3 * saved[0] * saved[0];
    return {of_x, gradients[0].sum_to_size(saved[1].sizes())};
  }
};

Pair differentiable(const Tensor& x, const Tensor& bias) {
  auto results = Cube::apply(x, bias);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY(com_acme, library) {
  library.def("Cube(Tensor x, Tensor bias) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(com_acme, CPU, library) {
  library.impl("Cube", cube);
}
TORCH_LIBRARY_IMPL(com_acme, Meta, library) {
  library.impl("Cube", describe);
}
TORCH_LIBRARY_IMPL(com_acme, Autograd, library) {
  library.impl("Cube", differentiable);
}
