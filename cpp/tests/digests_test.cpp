// The numbers are the same on every machine: digests of all that the kernels write, held against those in digests.h.
// Inputs are made of integers alone, for a library's random numbers are not the same everywhere. `digests_test --print`
// writes the table.
#include "tests/digests.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "io/checksum.h"
#include "simd/land.h"
#include "simd/update.h"
#include "tests/check.h"

namespace {

using namespace offload;
using Bytes = std::vector<unsigned char>;

constexpr std::size_t kSome = 5 * kGroup + 77;
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
const char* name_of_dtype(Dtype dtype) { return dtype == Dtype::f32 ? "fp32" : dtype == Dtype::bf16 ? "bf16" : "fp16"; }

// Among ordinary numbers none, those that are near zero, or all special ones. (What is not finite spoils groups of
// int8 moments, whole.)
enum class Special : std::size_t { none, tiny, any };
constexpr Special kSpecials[] = {Special::none, Special::tiny, Special::any};
constexpr std::size_t kTiny = 9, kTinyHalf = 5;

// Zeros, denormals, where fp16 and fp32 end, infinities, quiet and signaling NaN with and without sign and payload.
constexpr std::uint32_t kSpecial[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff, 0x00800000,
                                      0x33000000, 0x33800000, 0x387fc000, 0x477fe000, 0x477ff000, 0x7f7fffff,
                                      0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001,
                                      0xffbfffff, 0x7fedcba9, 0xff812345};
constexpr std::uint16_t kSpecialHalf[] = {0,      0x8000, 1,      0x83ff, 0x0400, 0x7bff, 0xfbff,
                                          0x7c00, 0xfc00, 0x7e00, 0xfe00, 0x7c01, 0xfdff, 0x7e55};

class Random {  // splitmix64
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint32_t next() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>(x >> 32);
  }

 private:
  std::uint64_t state_;
};

template <class T>
void append(Bytes& bytes, T value) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof value);
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

struct Inputs {
  Special special;
  std::uint64_t seed;

  // Magnitudes from 2^-10 to 4, evenly by exponent.
  Bytes numbers(Dtype dtype, std::size_t n, std::uint64_t salt, bool positive = false) const {
    const std::size_t kinds = special == Special::any ? std::size(kSpecial) : kTiny;
    const std::size_t kinds_half = special == Special::any ? std::size(kSpecialHalf) : kTinyHalf;
    Random random(seed * 1000 + salt);
    Bytes bytes;
    for (std::size_t i = 0; i < n; ++i) {
      const bool one = special != Special::none && random.next() % 16 == 0;
      const std::uint32_t word = random.next(), fraction = random.next() >> 9, exponent = word % 12;
      const std::uint32_t sign = positive ? 0 : word & 0x80000000u;
      const std::uint32_t bits = one ? kSpecial[word % kinds] : sign | (117 + exponent) << 23 | fraction;
      const std::uint32_t half =
          one ? kSpecialHalf[word % kinds_half] : sign >> 16 | (5 + exponent) << 10 | fraction >> 13;
      if (dtype == Dtype::f32)
        append(bytes, bits);
      else
        append(bytes, static_cast<std::uint16_t>(dtype == Dtype::bf16 ? bits >> 16 : half));
    }
    return bytes;
  }
  Bytes patterns(std::size_t nbytes, std::uint64_t salt) const {
    Random random(seed * 1000 + salt);
    Bytes bytes;
    while (bytes.size() < nbytes) append(bytes, static_cast<unsigned char>(random.next()));
    return bytes;
  }
  Bytes scales(std::size_t n, std::uint64_t salt) const {
    Bytes bytes = numbers(Dtype::f32, groups_of(n), salt, true);
    for (std::size_t group = 0; special == Special::any && group < groups_of(n); group += 2) {
      constexpr std::uint32_t kScales[] = {0, 0x00800000, 0x7fc00000, 0xff800001};
      std::memcpy(bytes.data() + 4 * group, kScales + (group + salt) / 2 % std::size(kScales), 4);
    }
    return bytes;
  }
};

class Digest {
 public:
  void add(const Bytes& bytes) { sums_.push_back(io::checksum(bytes.data(), bytes.size())); }
  std::uint32_t value() const { return io::checksum(sums_.data(), sums_.size() * sizeof sums_[0]); }

 private:
  std::vector<std::uint32_t> sums_;
};

struct Named {
  std::string name;
  std::uint32_t digest;
};
using Table = std::vector<Named>;

Hyper hyper_of(Rule rule, bool decoupled, int which) {
  Hyper h{};
  h.lr = 1e-2, h.beta1 = which % 2 ? 0.3 : 0.9, h.beta2 = which % 2 ? 0.4 : 0.999, h.eps = 1e-8;
  h.weight_decay = which == 3 ? 0.0 : 0.1, h.grad_scale = 0.7, h.step = 3, h.active = 1, h.decoupled = decoupled;
  h.maximize = which == 2, h.rule = static_cast<std::uint8_t>(rule), h.seed = 11;
  return h;
}

struct State {
  State(const Inputs& in, Rule rule, const Form& form) {
    const bool bytes = form.moments == Moments::i8, split = form.master == Master::split;
    const Dtype moment = form.moments == Moments::f32 ? Dtype::f32 : Dtype::bf16;
    master = in.numbers(split ? Dtype::bf16 : Dtype::f32, kSome, 1);
    if (split) low = in.patterns(2 * kSome, 2);
    if (keeps_exp_avg(rule)) exp_avg = bytes ? in.patterns(kSome, 3) : in.numbers(moment, kSome, 3);
    if (keeps_exp_avg(rule) && bytes) exp_avg_scale = in.scales(kSome, 4);
    if (keeps_exp_avg_sq(rule)) exp_avg_sq = bytes ? in.patterns(kSome, 5) : in.numbers(moment, kSome, 5, true);
    if (keeps_exp_avg_sq(rule) && bytes) exp_avg_sq_scale = in.scales(kSome, 6);
  }
  Arrays with(const Bytes& grad, Bytes* out) {
    const auto of = [](Bytes& bytes) { return bytes.empty() ? nullptr : bytes.data(); };
    return {master.data(),     of(low),        grad.data(),          of(exp_avg),
            of(exp_avg_scale), of(exp_avg_sq), of(exp_avg_sq_scale), out ? out->data() : nullptr};
  }
  void give(Digest& to) const {
    for (const Bytes* part : {&master, &low, &exp_avg, &exp_avg_scale, &exp_avg_sq, &exp_avg_sq_scale}) to.add(*part);
  }

  Bytes master, low, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale;
};

// Two steps, and a copy written without one.
void steps(Digest& digest, Rule rule, const Form& form, bool copies, const Inputs& in, bool decoupled, int which,
           Level level) {
  ThreadPool one(1);
  State state(in, rule, form);
  Bytes out(kSome * bytes_of(form.out));
  Hyper h = hyper_of(rule, decoupled, which);
  for (int step = 0; step < 3; ++step, h.step += 997) {
    h.active = step < 2;
    const Bytes grad = in.numbers(form.grad, kSome, 10 + static_cast<std::uint64_t>(step));
    update(h, form, state.with(grad, copies ? &out : nullptr), 2 * kGroup, kSome, one, level);
    state.give(digest);
    digest.add(out);
  }
}

void updates(Table& table, Level level) {
  constexpr const char* kRules[] = {"adam", "lion", "adagrad"};
  constexpr const char* kMasters[] = {"fp32", "split"};
  constexpr const char* kMoments[] = {"fp32", "bf16", "int8"};
  for (int rule = 0; rule < 3; ++rule)
    for (int master = 0; master < 2; ++master)
      for (int moments = 0; moments < 3; ++moments) {
        Digest digest;
        std::uint64_t seed = 0;
        for (Dtype grad : kDtypes)
          for (int out = 0; out < 4; ++out)
            for (bool decoupled : {true, false})
              for (Special special : kSpecials) {
                const Form form{static_cast<Master>(master), static_cast<Moments>(moments), grad, kDtypes[out % 3]};
                steps(digest, static_cast<Rule>(rule), form, out < 3, {special, ++seed}, decoupled, out, level);
              }
        table.push_back(
            {std::string("update ") + kRules[rule] + " " + kMasters[master] + " " + kMoments[moments], digest.value()});
      }
}

void landings(Table& table, Level level) {
  constexpr std::size_t n = kBlock + 1000 + 7;
  ThreadPool one(1);
  for (Dtype dst : kDtypes)
    for (Dtype src : kDtypes) {
      Digest digest;
      for (Special special : kSpecials)
        for (int way = 0; way < 3; ++way) {
          const Inputs in{special, 50};
          const Bytes came = in.numbers(src, n, 1);
          Bytes held = in.numbers(dst, n, 2), sums(2 * sizeof(double));
          land(held.data(), dst, came.data(), src, n, way == 2, way == 0 ? 1.0f : 0.3f,
               reinterpret_cast<double*>(sums.data()), one, level);
          digest.add(held);
          digest.add(sums);
          sumsq(came.data(), src, n, reinterpret_cast<double*>(sums.data()), one, level);
          digest.add(sums);
        }
      table.push_back({std::string("land ") + name_of_dtype(dst) + " from " + name_of_dtype(src), digest.value()});
    }
}

// Patterns of all exponents; of 16 bits, all.
Bytes patterns_of(Dtype dtype) {
  Bytes bytes;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    if (dtype != Dtype::f32) {
      append(bytes, static_cast<std::uint16_t>(i));
      continue;
    }
    for (std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) append(bytes, i << 16 | low);
  }
  return bytes;
}

void conversions(Table& table, Level level) {
  ThreadPool one(1);
  for (Dtype src : kDtypes) {
    const Bytes from = patterns_of(src);
    const std::size_t n = from.size() / bytes_of(src);
    for (Dtype dst : kDtypes) {
      Bytes to(n * bytes_of(dst));
      Digest digest;
      convert(to.data(), dst, from.data(), src, n, one, level);
      digest.add(to);
      table.push_back({std::string("convert ") + name_of_dtype(src) + " to " + name_of_dtype(dst), digest.value()});
    }
  }
}

void storage(Table& table, Level level) {
  ThreadPool one(1);
  const auto floats = [](Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); };
  Bytes from = patterns_of(Dtype::f32);
  const std::size_t n = from.size() / 4;
  Bytes high(2 * n), low(2 * n), back(4 * n);
  Digest halves;
  split(high.data(), low.data(), floats(from), n, one, level);
  for (const Bytes* bytes : {&high, &low}) halves.add(*bytes);
  const Inputs any{Special::none, 60};
  join(floats(back), any.patterns(2 * n, 1).data(), any.patterns(2 * n, 2).data(), n, one, level);
  halves.add(back);
  table.push_back({"split and join", halves.value()});
  for (bool with_sign : {true, false}) {
    Digest digest;
    for (Special special : kSpecials) {
      const Inputs in{special, 70};
      Bytes x = in.numbers(Dtype::f32, kSome, 1), codes(kSome), scales(4 * groups_of(kSome));
      encode(codes.data(), scales.data(), floats(x), with_sign, kSome, one, level);
      for (const Bytes* bytes : {&codes, &scales}) digest.add(*bytes);
      codes = in.patterns(kSome, 2), scales = in.scales(kSome, 3);
      decode(floats(x), codes.data(), scales.data(), with_sign, kSome, one, level);
      digest.add(x);
    }
    table.push_back({with_sign ? "encode and decode with sign" : "encode and decode without", digest.value()});
  }
}

Table digests_of(Level level) {
  Table table;
  const Bytes bytes = Inputs{Special::none, 80}.patterns(1003, 1);
  table.push_back({"checksum", io::checksum(bytes.data(), bytes.size())});
  CHECK(io::checksum_by_table(bytes.data(), bytes.size()) == table[0].digest);
  updates(table, level);
  landings(table, level);
  conversions(table, level);
  storage(table, level);
  return table;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--print") == 0) {
    for (const Named& row : digests_of(Level::scalar))
      std::printf("    {\"%s\", 0x%08x},\n", row.name.c_str(), static_cast<unsigned>(row.digest));
    return 0;
  }
  int wrong = 0;
  for (Level level : available_levels()) {
    const Table table = digests_of(level);
    CHECK(table.size() == std::size(kDigests));
    for (std::size_t i = 0; i < table.size(); ++i) {
      CHECK(table[i].name == kDigests[i].name);
      if (table[i].digest == kDigests[i].digest) continue;
      std::fprintf(stderr, "%s, %s: %08x, not %08x\n", name_of(level), kDigests[i].name,
                   static_cast<unsigned>(table[i].digest), static_cast<unsigned>(kDigests[i].digest));
      ++wrong;
    }
    std::printf("%s: %zu digests\n", name_of(level), table.size());
  }
  return wrong != 0;
}
