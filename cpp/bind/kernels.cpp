// Kernels under raw addresses: offload/ops.py and the runtime validate, these refuse only what would crash at once.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "simd/adam.h"
#include "simd/copy.h"
#include "simd/heap.h"
#include "simd/land.h"
#include "simd/topology.h"
#include "simd/update.h"

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
  if (hyper.rule > static_cast<int>(Rule::adagrad))
    throw std::invalid_argument("no rule code " + std::to_string(hyper.rule) + ": 0 Adam, 1 Lion, 2 Adagrad");
  if (hyper.active && hyper.step < 1)
    throw std::invalid_argument("step counts from 1, got " + std::to_string(hyper.step));
  return hyper;
}

void bind_adamw(Address master, Address grad, int grad_dtype, Address exp_avg, Address exp_avg_sq, Address out,
                int out_dtype, std::size_t n, const py::buffer& hyper, int threads, const LevelName& level) {
  const Hyper h = hyper_of(hyper);
  if (h.rule != 0) throw std::invalid_argument("hyper is of another rule than Adam: use update");
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

template <class T>
T code_of(int code, int last, const char* what) {
  if (code < 0 || code > last) throw std::invalid_argument(std::string("no ") + what + " code " + std::to_string(code));
  return static_cast<T>(code);
}

using Addresses = std::tuple<Address, Address, Address, Address, Address, Address, Address, Address>;

// What the form and the rule need is there.
Arrays arrays_of(const Addresses& given, const Form& form, const Hyper& hyper, std::size_t n) {
  const auto& [master, low, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, out] = given;
  const Rule rule = static_cast<Rule>(hyper.rule);
  const bool m = hyper.active && keeps_exp_avg(rule), v = hyper.active && keeps_exp_avg_sq(rule);
  const bool coded = form.moments == Moments::i8, split = form.master == Master::split;
  return {pointer<void>(master, n, "master"),
          split ? pointer<void>(low, n, "low") : nullptr,
          pointer<const void>(grad, hyper.active ? n : 0, "grad"),
          m ? pointer<void>(exp_avg, n, "exp_avg") : nullptr,
          m && coded ? pointer<void>(exp_avg_scale, n, "exp_avg_scale") : nullptr,
          v ? pointer<void>(exp_avg_sq, n, "exp_avg_sq") : nullptr,
          v && coded ? pointer<void>(exp_avg_sq_scale, n, "exp_avg_sq_scale") : nullptr,
          reinterpret_cast<void*>(out)};
}

void bind_update(const Addresses& addresses, const std::tuple<int, int, int, int>& form_codes, std::uint64_t first,
                 std::size_t n, const py::buffer& hyper, int threads, const LevelName& level) {
  const Hyper h = hyper_of(hyper);
  const Level at = level_of(level);
  const auto& [master, moments, grad, out] = form_codes;
  const Form form{code_of<Master>(master, 1, "master"), code_of<Moments>(moments, 2, "moments"), dtype_of(grad),
                  dtype_of(out)};
  if (first % kGroup) throw std::invalid_argument("first is " + std::to_string(first) + ": not a multiple of 256");
  const Arrays arrays = arrays_of(addresses, form, h, n);
  ThreadPool pool(threads);
  py::gil_scoped_release release;
  update(h, form, arrays, first, n, pool, at);
}

void bind_split(Address high, Address low, Address src, std::size_t n, int threads, const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  void *h = pointer<void>(high, n, "high"), *l = pointer<void>(low, n, "low");
  const float* s = pointer<const float>(src, n, "src");
  py::gil_scoped_release release;
  split(h, l, s, n, pool, at);
}

void bind_join(Address dst, Address high, Address low, std::size_t n, int threads, const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  float* d = pointer<float>(dst, n, "dst");
  const void *h = pointer<const void>(high, n, "high"), *l = pointer<const void>(low, n, "low");
  py::gil_scoped_release release;
  join(d, h, l, n, pool, at);
}

void bind_encode(Address codes, Address scales, Address src, bool with_sign, std::size_t n, int threads,
                 const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  void *c = pointer<void>(codes, n, "codes"), *s = pointer<void>(scales, n, "scales");
  const float* x = pointer<const float>(src, n, "src");
  py::gil_scoped_release release;
  encode(c, s, x, with_sign, n, pool, at);
}

void bind_decode(Address dst, Address codes, Address scales, bool with_sign, std::size_t n, int threads,
                 const LevelName& level) {
  const Level at = level_of(level);
  ThreadPool pool(threads);
  float* d = pointer<float>(dst, n, "dst");
  const void *c = pointer<const void>(codes, n, "codes"), *s = pointer<const void>(scales, n, "scales");
  py::gil_scoped_release release;
  decode(d, c, s, with_sign, n, pool, at);
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

void bind_updates(py::module_& m) {
  using py::arg;
  m.attr("GROUP") = kGroup;
  m.def("adamw", &bind_adamw, arg("master"), arg("grad"), arg("grad_dtype"), arg("exp_avg"), arg("exp_avg_sq"),
        arg("out"), arg("out_dtype"), arg("n"), arg("hyper"), arg("threads") = 0, arg("level") = py::none());
  m.def("update", &bind_update, arg("arrays"), arg("form"), arg("first"), arg("n"), arg("hyper"), arg("threads") = 0,
        arg("level") = py::none());
  m.def("split", &bind_split, arg("high"), arg("low"), arg("src"), arg("n"), arg("threads") = 0,
        arg("level") = py::none());
  m.def("join", &bind_join, arg("dst"), arg("high"), arg("low"), arg("n"), arg("threads") = 0,
        arg("level") = py::none());
  m.def("encode", &bind_encode, arg("codes"), arg("scales"), arg("src"), arg("with_sign"), arg("n"), arg("threads") = 0,
        arg("level") = py::none());
  m.def("decode", &bind_decode, arg("dst"), arg("codes"), arg("scales"), arg("with_sign"), arg("n"), arg("threads") = 0,
        arg("level") = py::none());
}

}  // namespace

void bind_kernels(py::module_& m) {
  using py::arg;
  bind_updates(m);
  m.attr("BLOCK") = kBlock;
  m.def("simd_level", [] { return name_of(current_level()); }, "The instruction set in use: OFFLOAD_SIMD or the best.");
  m.def("simd_levels", &level_names, "The instruction sets this CPU can run, best first.");
  m.def("default_threads", &default_threads,
        "OFFLOAD_THREADS, or the physical cores this process may use, its part among ranks.");
  m.def("physical_cores", &physical_cores, arg("cpus"), arg("root") = "");
  m.def("quota_cpus", &quota_cpus, arg("root") = "");
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
  m.def("keep_freed", &keep_freed, py::arg("kept"),
        "Whether freed heap memory stays with the process or goes back to the kernel; until the next call.");
  m.def("freed_bytes", &freed_bytes, "Bytes that are free in the heap.");
  m.def("resident_bytes", &resident_bytes, "Resident memory of this process now; 0 where the kernel does not say.");
  m.def("trim", &trim, "Gives free heap pages back now; true if any memory was.");
}

}  // namespace offload
