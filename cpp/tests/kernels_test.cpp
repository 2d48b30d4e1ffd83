// The kernels without Python, for the sanitizers: arrays of exact size, every level, many threads, forks.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "simd/adam.h"
#include "simd/copy.h"
#include "simd/land.h"
#include "simd/topology.h"
#include "tests/check.h"

namespace {

using offload::Dtype;
using offload::Hyper;
using offload::Level;
using offload::ThreadPool;
using Bytes = std::vector<char>;

#if defined(__has_feature)
#define OFFLOAD_HAS_FEATURE(name) __has_feature(name)
#else
#define OFFLOAD_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_THREAD__) || OFFLOAD_HAS_FEATURE(thread_sanitizer)
constexpr bool kForks = false;  // TSan cannot start threads in the child of a process that has some
#else
constexpr bool kForks = true;
#endif

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

// The same sequence everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2654435769u + 1) {}
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  std::uint64_t state_;
};

Bytes numbers(std::size_t n, Dtype dtype, std::uint64_t seed, bool positive = false) {
  Random random(seed);
  std::vector<float> x(n);
  for (float& value : x) value = positive ? std::fabs(random.next()) : random.next();
  for (std::size_t i = 7; i < n; i += 61) x[i] = std::numeric_limits<float>::denorm_min() * static_cast<float>(i);
  Bytes bytes(n * bytes_of(dtype));
  ThreadPool one(1);
  offload::convert(bytes.data(), dtype, x.data(), Dtype::f32, n, one, Level::scalar);
  return bytes;
}

float* floats(Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

struct State {
  State(std::size_t n, Dtype grad_dtype, Dtype out_dtype)
      : n(n),
        gd(grad_dtype),
        od(out_dtype),
        master(numbers(n, Dtype::f32, 1)),
        grad(numbers(n, grad_dtype, 2)),
        exp_avg(numbers(n, Dtype::f32, 3)),
        exp_avg_sq(numbers(n, Dtype::f32, 4, true)),
        out(n * bytes_of(out_dtype)) {}

  void step(const Hyper& hyper, ThreadPool& pool, Level level, std::size_t from, std::size_t to) {
    adam_update(hyper, floats(master) + from, grad.data() + from * bytes_of(gd), gd, floats(exp_avg) + from,
                floats(exp_avg_sq) + from, out.data() + from * bytes_of(od), od, to - from, pool, level);
  }
  bool operator==(const State& other) const {
    return master == other.master && grad == other.grad && exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq &&
           out == other.out;
  }

  std::size_t n;
  Dtype gd, od;
  Bytes master, grad, exp_avg, exp_avg_sq, out;
};

Hyper hyper(bool decoupled) {
  Hyper h{};
  h.lr = 1e-2, h.beta1 = 0.9, h.beta2 = 0.99, h.eps = 1e-8, h.weight_decay = 0.1, h.grad_scale = 0.7;
  h.step = 3, h.active = 1, h.decoupled = decoupled;
  return h;
}

void adam_gives_the_same_bits() {
  for (std::size_t n : {0, 1, 15, 16, 17, 63, 1025, 4097, 70001}) {
    for (Dtype gd : kDtypes) {
      for (Dtype od : kDtypes) {
        const Hyper h = hyper(n % 2 == 0);
        ThreadPool one(1), three(3);
        State want(n, gd, od);
        want.step(h, one, Level::scalar, 0, n);
        for (Level level : offload::available_levels()) {
          State whole(n, gd, od), halves(n, gd, od);
          whole.step(h, three, level, 0, n);
          halves.step(h, one, level, 0, n / 3);
          halves.step(h, three, level, n / 3, n);
          CHECK(whole == want);
          CHECK(halves == want);
        }
      }
    }
  }
}

void one_element_by_hand() {
  ThreadPool one(1);
  for (Level level : offload::available_levels()) {
    float p = 1, m = 0, v = 0, g = 0.5f;
    Hyper h = hyper(true);
    h.step = 1, h.grad_scale = 1;
    adam_update(h, &p, &g, Dtype::f32, &m, &v, nullptr, Dtype::f32, 1, one, level);
    CHECK(std::fabs(m - 0.05f) < 1e-8f);
    CHECK(std::fabs(v - 0.0025f) < 1e-9f);
    CHECK(std::fabs(p - (1 - 1e-3f - 1e-2f)) < 1e-6f);
    h.active = 0;
    std::uint16_t out = 0;
    adam_update(h, &p, nullptr, Dtype::f32, nullptr, nullptr, &out, Dtype::bf16, 1, one, level);
    CHECK(out == 0x3f7d);  // 0.989 rounded
  }
}

void conversions_agree() {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<std::uint32_t> words(1 << 18);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::uint32_t>(i << 14) + (i % 7 << 11) + i % 3;
  ThreadPool two(2);
  for (Dtype from : kDtypes) {
    const void* src = from == Dtype::f32 ? static_cast<const void*>(words.data()) : halves.data();
    const std::size_t n = from == Dtype::f32 ? words.size() : halves.size();
    for (Dtype to : kDtypes) {
      Bytes want(n * bytes_of(to)), got(n * bytes_of(to));
      offload::convert(want.data(), to, src, from, n, two, Level::scalar);
      for (Level level : offload::available_levels()) {
        offload::convert(got.data(), to, src, from, n, two, level);
        CHECK(got == want);
      }
    }
  }
}

void landings_agree() {
  for (std::size_t n : {0, 1, 17, 4095, 4096, 4097, 140001}) {
    for (Dtype dd : kDtypes) {
      for (Dtype sd : kDtypes) {
        for (const auto& [accumulate, factor] : {std::pair(false, 1.0f), {false, 0.3f}, {true, 0.3f}}) {
          const std::size_t blocks = (n + offload::kBlock - 1) / offload::kBlock;
          const Bytes src = numbers(n, sd, 5), held = numbers(n, dd, 6);
          ThreadPool one(1), four(4);
          Bytes want = held;
          std::vector<double> want_sums(blocks), sums(blocks), again(blocks);
          offload::land(want.data(), dd, src.data(), sd, n, accumulate, factor, want_sums.data(), one, Level::scalar);
          for (Level level : offload::available_levels()) {
            Bytes got = held;
            offload::land(got.data(), dd, src.data(), sd, n, accumulate, factor, sums.data(), four, level);
            CHECK(got == want);
            CHECK(sums == want_sums);
            offload::sumsq(got.data(), dd, n, again.data(), four, level);
            CHECK(again == want_sums);
            got = held;
            offload::land(got.data(), dd, src.data(), sd, n, accumulate, factor, nullptr, four, level);
            CHECK(got == want);
          }
        }
      }
    }
  }
}

void any_alignment() {
  const std::size_t n = 83;
  ThreadPool one(1);
  State want(n, Dtype::bf16, Dtype::f16);
  want.step(hyper(true), one, Level::scalar, 0, n);
  for (Level level : offload::available_levels()) {
    for (std::size_t offset = 0; offset < 64; ++offset) {
      State s(n, Dtype::bf16, Dtype::f16);
      for (Bytes* bytes : {&s.master, &s.grad, &s.exp_avg, &s.exp_avg_sq, &s.out})
        bytes->insert(bytes->begin(), offset, 'x');
      offload::kernels_of(level).adam(
          derive(hyper(true)), reinterpret_cast<float*>(s.master.data() + offset), s.grad.data() + offset, Dtype::bf16,
          reinterpret_cast<float*>(s.exp_avg.data() + offset), reinterpret_cast<float*>(s.exp_avg_sq.data() + offset),
          s.out.data() + offset, Dtype::f16, n);
      for (Bytes* bytes : {&s.master, &s.grad, &s.exp_avg, &s.exp_avg_sq, &s.out})
        bytes->erase(bytes->begin(), bytes->begin() + static_cast<std::ptrdiff_t>(offset));
      CHECK(s == want);
    }
  }
}

void copies() {
  ThreadPool two(2);
  for (std::size_t n : {0, 1, 63, 64, 65, 4096, (8 << 20) + 5}) {
    Bytes src(n + 1), dst(n + 3);
    for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 7);
    for (Level level : offload::available_levels()) {
      std::memset(dst.data(), 0, dst.size());
      offload::copy(dst.data() + 3, src.data() + 1, n, two, level);
      CHECK(n == 0 || std::memcmp(dst.data() + 3, src.data() + 1, n) == 0);
    }
  }
}

void callers_share_the_threads() {
  const std::size_t n = 200000;
  const Hyper h = hyper(true);
  ThreadPool one(1);
  State want(n, Dtype::bf16, Dtype::bf16);
  want.step(h, one, offload::current_level(), 0, n);
  std::vector<State> got(6, State(n, Dtype::bf16, Dtype::bf16));
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < got.size(); ++i)
    callers.emplace_back([&, i] {
      ThreadPool pool(static_cast<int>(1 + i % 4));
      got[i].step(h, pool, offload::current_level(), 0, n);
    });
  for (std::thread& caller : callers) caller.join();
  for (const State& s : got) CHECK(s == want);
}

void every_range_once() {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (std::size_t n : {0, 1, 9, 10, 11, 1000}) {
      std::vector<int> seen(n);
      pool.for_ranges(n, 10, [&](std::size_t begin, std::size_t count) {
        for (std::size_t i = begin; i < begin + count; ++i) ++seen[i];
      });
      for (int times : seen) CHECK(times == 1);
    }
  }
}

void a_forked_child_works() {
  const std::size_t n = 200000;
  ThreadPool three(3);
  State want(n, Dtype::bf16, Dtype::bf16), got = want;
  want.step(hyper(true), three, offload::current_level(), 0, n);
  const pid_t child = fork();
  if (child == 0) {
    got.step(hyper(true), three, offload::current_level(), 0, n);
    _exit(got == want ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main() {
  CHECK(offload::default_threads() >= 1);
  one_element_by_hand();
  adam_gives_the_same_bits();
  conversions_agree();
  landings_agree();
  any_alignment();
  copies();
  every_range_once();
  callers_share_the_threads();
  if (kForks && !emulated()) a_forked_child_works();
  std::printf("all kernels agree\n");
  return 0;
}
