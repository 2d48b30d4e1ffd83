// The Python-aware part: everything else in cpp/ takes raw pointers.
#include <pybind11/pybind11.h>

namespace offload {
void bind_kernels(pybind11::module_& m);
void bind_io(pybind11::module_& m);
}  // namespace offload

PYBIND11_MODULE(_core, m) {
  m.doc() = "SIMD updates, asynchronous file I/O and the streaming update pipeline.";
  offload::bind_kernels(m);
  offload::bind_io(m);
}
