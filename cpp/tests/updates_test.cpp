// Updates of every form without Python, for the sanitizers: arrays of exact size, every level, many threads.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "simd/land.h"
#include "simd/update.h"
#include "tests/check.h"

namespace {

using namespace offload;
using Bytes = std::vector<char>;

#if defined(__has_feature)
#define OFFLOAD_HAS_FEATURE(name) __has_feature(name)
#else
#define OFFLOAD_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || OFFLOAD_HAS_FEATURE(thread_sanitizer) || \
    OFFLOAD_HAS_FEATURE(address_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
bool slow() { return kSanitized || emulated(); }

constexpr Rule kRules[] = {Rule::adam, Rule::lion, Rule::adagrad};
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

Hyper hyper_of(Rule rule, bool decoupled) {
  Hyper h{};
  h.lr = 1e-2, h.beta1 = 0.9, h.beta2 = 0.99, h.eps = 1e-8, h.weight_decay = 0.1, h.grad_scale = 0.7;
  h.step = 3, h.active = 1, h.decoupled = decoupled, h.rule = static_cast<std::uint8_t>(rule), h.seed = 11;
  return h;
}

std::vector<float> normals(std::size_t n, unsigned seed, bool positive = false) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& value : x) value = positive ? std::fabs(normal(random)) : normal(random);
  for (std::size_t i = 7; i < n; i += 61) x[i] = std::numeric_limits<float>::denorm_min() * static_cast<float>(i);
  return x;
}

// A state of exact size, each array `shift` bytes from where an allocation starts.
struct State {
  State(std::size_t n, Rule rule, const Form& form, std::size_t shift = 0) : n(n), form(form), shift(shift) {
    ThreadPool one(1);
    const std::vector<float> p = normals(n, 1), g = normals(n, 2), m = normals(n, 3), v = normals(n, 4, true);
    put(grad, n * bytes_of(form.grad), [&](char* to) { to_dtype(to, form.grad, g); });
    put(out, n * bytes_of(form.out), [](char*) {});
    put(master, n * bytes_of(form.master), [](char*) {});
    if (form.master == Master::split) {
      put(low, 2 * n, [&](char* to) { split(at(master), to, p.data(), n, one, Level::scalar); });
    } else {
      to_dtype(at(master), Dtype::f32, p);
    }
    if (keeps_exp_avg(rule)) moment(exp_avg, exp_avg_scale, m, true);
    if (keeps_exp_avg_sq(rule)) moment(exp_avg_sq, exp_avg_sq_scale, v, false);
  }

  void to_dtype(char* to, Dtype dtype, const std::vector<float>& x) {
    ThreadPool one(1);
    std::vector<char> whole(n * bytes_of(dtype));
    convert(whole.data(), dtype, x.data(), Dtype::f32, n, one, Level::scalar);
    if (n) std::memcpy(to, whole.data(), whole.size());
  }
  void moment(Bytes& codes, Bytes& scales, const std::vector<float>& x, bool with_sign) {
    ThreadPool one(1);
    put(codes, n * bytes_of(form.moments), [&](char* to) {
      if (form.moments != Moments::i8) to_dtype(to, form.moments == Moments::f32 ? Dtype::f32 : Dtype::bf16, x);
    });
    if (form.moments != Moments::i8) return;
    put(scales, groups_of(n) * sizeof(float),
        [&](char* to) { encode(at(codes), to, x.data(), with_sign, n, one, Level::scalar); });
  }
  template <class F>
  void put(Bytes& bytes, std::size_t size, F fill) {
    bytes.assign(size + shift, 'x');
    fill(at(bytes));
  }
  char* at(Bytes& bytes, std::size_t offset = 0) { return bytes.empty() ? nullptr : bytes.data() + shift + offset; }

  void step(const Hyper& h, ThreadPool& pool, Level level, std::size_t from, std::size_t to) {
    const std::size_t moments = from * bytes_of(form.moments), scales = from / kGroup * sizeof(float);
    update(h, form,
           {at(master, from * bytes_of(form.master)), at(low, 2 * from), at(grad, from * bytes_of(form.grad)),
            at(exp_avg, moments), at(exp_avg_scale, scales), at(exp_avg_sq, moments), at(exp_avg_sq_scale, scales),
            at(out, from * bytes_of(form.out))},
           from, to - from, pool, level);
  }
  bool equals(State& other) {
    Bytes State::* const all[] = {
        &State::master,           &State::low, &State::grad, &State::exp_avg, &State::exp_avg_scale, &State::exp_avg_sq,
        &State::exp_avg_sq_scale, &State::out};
    for (const auto part : all) {
      Bytes &a = this->*part, &b = other.*part;
      const auto begin = [](Bytes& x, std::size_t by) {
        return x.empty() ? x.end() : x.begin() + static_cast<long>(by);
      };
      if (!std::equal(begin(a, shift), a.end(), begin(b, other.shift), b.end())) return false;
    }
    return true;
  }

  std::size_t n;
  Form form;
  std::size_t shift;
  Bytes master, low, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, out;
};

template <class F>
void each_form(const F& f) {
  int k = 0;
  for (Rule rule : kRules)
    for (Master master : {Master::f32, Master::split})
      for (Moments moments : {Moments::f32, Moments::bf16, Moments::i8})
        for (Dtype grad : kDtypes) f(rule, Form{master, moments, grad, kDtypes[k++ % 3]});
}

void forms_give_the_same_bits() {
  each_form([](Rule rule, const Form& form) {
    for (std::size_t n : {0, 1, 31, 32, 33, 255, 256, 257, 1025, 70001}) {
      if (slow() && n > 2000 && form.grad != Dtype::bf16) continue;
      const Hyper h = hyper_of(rule, n % 2 == 0);
      ThreadPool one(1), three(3);
      State want(n, rule, form);
      want.step(h, one, Level::scalar, 0, n);
      for (Level level : available_levels()) {
        State whole(n, rule, form), halves(n, rule, form, 1 + n % 5);
        const std::size_t cut = n / 2 / kGroup * kGroup;
        whole.step(h, three, level, 0, n);
        halves.step(h, one, level, 0, cut);
        halves.step(h, three, level, cut, n);
        CHECK(whole.equals(want));
        CHECK(halves.equals(want));
      }
    }
  });
}

void every_size_and_alignment() {
  ThreadPool one(1);
  const Form form{Master::split, Moments::i8, Dtype::bf16, Dtype::f16};
  for (std::size_t n = 0; n <= 1025; n += slow() ? 7 : 1) {
    State want(n, Rule::adam, form);
    want.step(hyper_of(Rule::adam, true), one, Level::scalar, 0, n);
    for (Level level : available_levels()) {
      State got(n, Rule::adam, form, n % 64);
      got.step(hyper_of(Rule::adam, true), one, level, 0, n);
      CHECK(got.equals(want));
    }
  }
}

void inactive_writes_the_copy() {
  ThreadPool two(2);
  each_form([&](Rule rule, const Form& form) {
    const std::size_t n = 1025;
    State s(n, rule, form), before = s;
    Hyper off = hyper_of(rule, true);
    off.active = 0;
    s.step(off, two, current_level(), 0, n);
    before.to_dtype(before.at(before.out), form.out, normals(n, 1));
    CHECK(s.equals(before));
  });
}

// A stretch of fp32 patterns that starts at `start`, by `step`: split, and rebuilt.
void split_patterns(std::uint32_t start, std::uint32_t step, std::size_t n, Level level, ThreadPool& pool) {
  static std::vector<std::uint32_t> x, back;
  static std::vector<std::uint16_t> high, low;
  x.resize(n), back.resize(n), high.resize(n), low.resize(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = start + static_cast<std::uint32_t>(i) * step;
  split(high.data(), low.data(), reinterpret_cast<const float*>(x.data()), n, pool, level);
  join(reinterpret_cast<float*>(back.data()), high.data(), low.data(), n, pool, level);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool nan = (x[i] & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t value = nan ? 0x7fc00000u : x[i];
    wrong += back[i] != value || high[i] != static_cast<std::uint16_t>((value + 0x8000u) >> 16);
  }
  CHECK(wrong == 0);
}

void every_pattern_is_split_and_rebuilt() {
  ThreadPool two(2);
  constexpr std::size_t kAtOnce = 1 << 20;
  for (Level level : available_levels()) {
    for (std::size_t n = 0; n < 100; ++n) split_patterns(0x12345678u, 0x9e3779b9u, n, level, two);  // ends of pairs
    const bool whole = !slow() && level == available_levels().front();
    const std::uint32_t step = whole ? 1 : 4099;
    for (std::uint64_t start = 0; start < std::uint64_t{1} << 32; start += std::uint64_t{kAtOnce} * step)
      split_patterns(static_cast<std::uint32_t>(start), step, kAtOnce, level, two);
    for (std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      split_patterns(low, 0x10000u, 65536, level, two);
  }
}

void codes_are_monotone_and_rebuilt() {
  ThreadPool one(1);
  for (Level level : available_levels()) {
    for (bool with_sign : {true, false}) {
      std::vector<unsigned char> codes(256), again(256);
      for (int i = 0; i < 256; ++i) codes[static_cast<std::size_t>(i)] = static_cast<unsigned char>(i);
      float scale = 0x1p-10f, rebuilt = 0;
      std::vector<float> x(256);
      decode(x.data(), codes.data(), &scale, with_sign, 256, one, level);
      for (std::size_t i = 1; i < (with_sign ? 128u : 256u); ++i) CHECK(x[i] > x[i - 1]);
      for (std::size_t i = 0; with_sign && i < 128; ++i) CHECK(x[i + 128] == -x[i]);
      encode(again.data(), &rebuilt, x.data(), with_sign, 256, one, level);
      CHECK(std::fabs(rebuilt - scale) < 1e-6f * scale);
      for (std::size_t i = 1; i < 256; ++i) CHECK(again[i] == codes[i] || x[i] == 0);
    }
  }
}

void callers_share_the_threads() {
  const std::size_t n = 100000;
  const Form form{Master::split, Moments::i8, Dtype::bf16, Dtype::bf16};
  const Hyper h = hyper_of(Rule::adam, true);
  ThreadPool one(1);
  State want(n, Rule::adam, form);
  std::vector<State> got(4, want);
  want.step(h, one, current_level(), 0, n);
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < got.size(); ++i)
    callers.emplace_back([&, i] {
      ThreadPool pool(static_cast<int>(1 + i));
      got[i].step(h, pool, current_level(), 0, n);
    });
  for (std::thread& caller : callers) caller.join();
  for (State& s : got) CHECK(s.equals(want));
}

}  // namespace

int main() {
  codes_are_monotone_and_rebuilt();
  forms_give_the_same_bits();
  every_size_and_alignment();
  inactive_writes_the_copy();
  callers_share_the_threads();
  every_pattern_is_split_and_rebuilt();
  std::printf("all forms agree\n");
  return 0;
}
