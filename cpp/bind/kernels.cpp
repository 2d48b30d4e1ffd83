// Kernels under raw addresses: offload/ops.py and the runtime validate, these refuse only what would crash at once.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "simd/adam.h"
#include "simd/copy.h"
#include "simd/heap.h"
#include "simd/land.h"
#include "simd/topology.h"

namespace py = pybind11;

namespace offload {
namespace {

using Address = std::uintptr_t;
using LevelName = std::optional<std::string>;

Dtype dtype_of(int code) {
  if (code < 0 || code > 2)
    throw std::invalid_argument("no dtype code " + std::to_string(code) + ": 0 fp32, 1 bf16, 2 fp16");
  return static_cast<Dtype>(code);
}

Level level_of(const LevelName& name) { return name ? level_named(*name) : current_level(); }

template <class T>
T* pointer(Address address, std::size_t n, const char* what) {
  if (!address && n) throw std::invalid_argument(std::string(what) + " is a null address");
  return reinterpret_cast<T*>(address);
}

Hyper hyper_of(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  if (info.size * info.itemsize != sizeof(Hyper))
    throw std::invalid_argument("hyper is not one offload.ops.HYPER record of 64 bytes");
  Hyper hyper;
  std::memcpy(&hyper, info.ptr, sizeof hyper);
  if (hyper.active && hyper.step < 1)
    throw std::invalid_argument("step counts from 1, got " + std::to_string(hyper.step));
  return hyper;
}

void bind_adamw(Address master, Address grad, int grad_dtype, Address exp_avg, Address exp_avg_sq, Address out,
                int out_dtype, std::size_t n, const py::buffer& hyper, int threads, const LevelName& level) {
  const Hyper h = hyper_of(hyper);
  const Level at = level_of(level);
  ThreadPool pool(threads);
  float* p = pointer<float>(master, n, "master");
  const void* g = pointer<const void>(grad, h.active ? n : 0, "grad");
  float* m = pointer<float>(exp_avg, h.active ? n : 0, "exp_avg");
  float* v = pointer<float>(exp_avg_sq, h.active ? n : 0, "exp_avg_sq");
  const Dtype gd = dtype_of(grad_dtype), od = dtype_of(out_dtype);
  py::gil_scoped_release release;
  adam_update(h, p, g, gd, m, v, reinterpret_cast<void*>(out), od, n, pool, at);
}

void bind_land(Address dst, int dst_dtype, Address src, int src_dtype, std::size_t n, bool accumulate, float scale,
               Address block_sums, int threads, const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  void* d = pointer<void>(dst, n, "dst");
  const void* s = pointer<const void>(src, n, "src");
  const Dtype dd = dtype_of(dst_dtype), sd = dtype_of(src_dtype);
  py::gil_scoped_release release;
  land(d, dd, s, sd, n, accumulate, scale, reinterpret_cast<double*>(block_sums), pool, at);
}

void bind_sumsq(Address src, int dtype, std::size_t n, Address block_sums, int threads, const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  const void* s = pointer<const void>(src, n, "src");
  double* sums = pointer<double>(block_sums, n, "block_sums");
  const Dtype d = dtype_of(dtype);
  py::gil_scoped_release release;
  sumsq(s, d, n, sums, pool, at);
}

void bind_convert(Address dst, int dst_dtype, Address src, int src_dtype, std::size_t n, int threads,
                  const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  void* d = pointer<void>(dst, n, "dst");
  const void* s = pointer<const void>(src, n, "src");
  const Dtype dd = dtype_of(dst_dtype), sd = dtype_of(src_dtype);
  py::gil_scoped_release release;
  convert(d, dd, s, sd, n, pool, at);
}

void bind_scale(Address dst, int dtype, std::size_t n, float factor, int threads, const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  void* d = pointer<void>(dst, n, "dst");
  const Dtype dd = dtype_of(dtype);
  py::gil_scoped_release release;
  scale(d, dd, n, factor, pool, at);
}

void bind_copy(Address dst, Address src, std::size_t nbytes, int threads, const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  void* d = pointer<void>(dst, nbytes, "dst");
  const void* s = pointer<const void>(src, nbytes, "src");
  py::gil_scoped_release release;
  copy(d, s, nbytes, pool, at);
}

py::list level_names() {
  py::list names;
  for (Level level : available_levels()) names.append(name_of(level));
  return names;
}

}  // namespace

void bind_kernels(py::module_& m) {
  using py::arg;
  m.attr("BLOCK") = kBlock;
  m.def("simd_level", [] { return name_of(current_level()); }, "The instruction set in use: OFFLOAD_SIMD or the best.");
  m.def("simd_levels", &level_names, "The instruction sets this CPU can run, best first.");
  m.def("default_threads", &default_threads, "OFFLOAD_THREADS, or the physical cores this process may use.");
  m.def("physical_cores", &physical_cores, arg("cpus"), arg("root") = "");
  m.def("quota_cpus", &quota_cpus, arg("root") = "");
  m.def("adamw", &bind_adamw, arg("master"), arg("grad"), arg("grad_dtype"), arg("exp_avg"), arg("exp_avg_sq"),
        arg("out"), arg("out_dtype"), arg("n"), arg("hyper"), arg("threads") = 0, arg("level") = py::none());
  m.def("land", &bind_land, arg("dst"), arg("dst_dtype"), arg("src"), arg("src_dtype"), arg("n"),
        arg("accumulate") = false, arg("scale") = 1.0f, arg("block_sums") = 0, arg("threads") = 0,
        arg("level") = py::none());
  m.def("sumsq", &bind_sumsq, arg("src"), arg("dtype"), arg("n"), arg("block_sums"), arg("threads") = 0,
        arg("level") = py::none());
  m.def("convert", &bind_convert, arg("dst"), arg("dst_dtype"), arg("src"), arg("src_dtype"), arg("n"),
        arg("threads") = 0, arg("level") = py::none());
  m.def("scale", &bind_scale, arg("dst"), arg("dtype"), arg("n"), arg("factor"), arg("threads") = 0,
        arg("level") = py::none());
  m.def("copy", &bind_copy, arg("dst"), arg("src"), arg("nbytes"), arg("threads") = 0, arg("level") = py::none());
  m.def("tune_malloc", &tune_malloc, "Makes freed heap memory go back to the kernel; for the life of the process.");
  m.def("trim", &trim, "Gives free heap pages back now; true if any memory was.");
}

}  // namespace offload
