#include "io/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace offload::io {

namespace {

constexpr size_t kLanes = 4;
constexpr size_t kGroupBytes = kLanes * sizeof(uint64_t);
constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, bits reversed
using Lanes = std::array<uint32_t, kLanes>;
constexpr Lanes kStart = {~0u, ~1u, ~2u, ~3u};  // unlike each other: exchanged lanes are no match

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint64_t word_at(const unsigned char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

uint32_t table_word(uint32_t crc, uint64_t word) {
  word ^= crc;
  uint32_t next = 0;
  for (size_t k = 0; k < 8; ++k) next ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  return next;
}

uint32_t table_byte(uint32_t crc, unsigned char byte) { return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xff]; }

uint32_t by_table(const void* data, size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  Lanes lanes = kStart;
  for (; nbytes >= kGroupBytes; bytes += kGroupBytes, nbytes -= kGroupBytes) {
    for (size_t k = 0; k < kLanes; ++k) lanes[k] = table_word(lanes[k], word_at(bytes + 8 * k));
  }
  for (; nbytes != 0; ++bytes, --nbytes) lanes[0] = table_byte(lanes[0], *bytes);
  return table_word(table_word(~0u, lanes[0] | uint64_t{lanes[1]} << 32), lanes[2] | uint64_t{lanes[3]} << 32);
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) uint32_t by_sse42(const void* data, size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t a = kStart[0], b = kStart[1], c = kStart[2], d = kStart[3];
  for (; nbytes >= kGroupBytes; bytes += kGroupBytes, nbytes -= kGroupBytes) {
    a = _mm_crc32_u64(a, word_at(bytes));
    b = _mm_crc32_u64(b, word_at(bytes + 8));
    c = _mm_crc32_u64(c, word_at(bytes + 16));
    d = _mm_crc32_u64(d, word_at(bytes + 24));
  }
  for (; nbytes != 0; ++bytes, --nbytes) a = _mm_crc32_u8(static_cast<uint32_t>(a), *bytes);
  return static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(~0u, a | b << 32), c | d << 32));
}

#elif defined(__aarch64__)

uint32_t arm_word(uint32_t crc, uint64_t word) {
  __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}

uint32_t arm_byte(uint32_t crc, unsigned char byte) {
  __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(static_cast<uint32_t>(byte)));
  return crc;
}

uint32_t by_armv8(const void* data, size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  Lanes lanes = kStart;
  for (; nbytes >= kGroupBytes; bytes += kGroupBytes, nbytes -= kGroupBytes) {
    for (size_t k = 0; k < kLanes; ++k) lanes[k] = arm_word(lanes[k], word_at(bytes + 8 * k));
  }
  for (; nbytes != 0; ++bytes, --nbytes) lanes[0] = arm_byte(lanes[0], *bytes);
  return arm_word(arm_word(~0u, lanes[0] | uint64_t{lanes[1]} << 32), lanes[2] | uint64_t{lanes[3]} << 32);
}

#endif

struct Way {
  uint32_t (*sum)(const void*, size_t);
  const char* name;
};

Way choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return {by_sse42, "sse4.2"};
#elif defined(__aarch64__)
  if ((::getauxval(AT_HWCAP) & (1ul << 7)) != 0) return {by_armv8, "armv8"};  // HWCAP_CRC32
#endif
  return {by_table, "table"};
}

const Way& way() {
  static const Way chosen = choose();
  return chosen;
}

}  // namespace

uint32_t checksum(const void* data, size_t nbytes) { return way().sum(data, nbytes); }

uint32_t checksum_by_table(const void* data, size_t nbytes) { return by_table(data, nbytes); }

const char* checksum_way() { return way().name; }

}  // namespace offload::io
