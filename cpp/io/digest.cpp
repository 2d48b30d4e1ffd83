#include "io/digest.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace offload::io {

namespace {

constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                 0x27D4EB2F165667C5};
constexpr size_t kSecretBytes = 192;
constexpr uint64_t kShort = 240;
constexpr unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const unsigned char* at) noexcept {  // little-endian, as every machine that this is built for
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

void add(uint64_t* lanes, const unsigned char* stripe, const unsigned char* secret) noexcept {
  uint64_t keyed[8], data[8];
  for (int i = 0; i < 8; ++i) {
    data[i] = word(stripe + 8 * i);
    keyed[i] = data[i] ^ word(secret + 8 * i);
  }
  for (int i = 0; i < 8; ++i) lanes[i] += (keyed[i] & 0xFFFFFFFF) * (keyed[i] >> 32) + data[i ^ 1];
}

void scramble(uint64_t* lanes) noexcept {
  for (int i = 0; i < 8; ++i) {
    const uint64_t lane = lanes[i] ^ (lanes[i] >> 47) ^ word(kSecret + kSecretBytes - 64 + 8 * i);
    lanes[i] = lane * kPrime32[0];
  }
}

uint64_t folded(uint64_t a, uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t* lanes, const unsigned char* secret, uint64_t start) noexcept {
  for (int i = 0; i < 4; ++i)
    start += folded(lanes[2 * i] ^ word(secret + 16 * i), lanes[2 * i + 1] ^ word(secret + 16 * i + 8));
  start ^= start >> 37;
  start *= 0x165667919E3779F9;
  return start ^ (start >> 32);
}

}  // namespace

Digest::Digest() noexcept
    : lanes_{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]} {}

void Digest::take(const unsigned char* block) noexcept {
  for (size_t i = 0; i < kBlock / kStripe; ++i) add(lanes_, block + i * kStripe, kSecret + 8 * i);
  scramble(lanes_);
}

void Digest::update(const void* data, size_t nbytes) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
  size_t held = nbytes_ == 0 ? 0 : (nbytes_ - 1) % kBlock + 1;
  nbytes_ += nbytes;
  if (held != 0 && held + nbytes > kBlock) {
    std::memcpy(waiting_ + held, at, kBlock - held);
    at += kBlock - held;
    nbytes -= kBlock - held;
    held = 0;
    take(waiting_);
    std::memcpy(last_, waiting_ + kBlock - kStripe, kStripe);
  }
  for (; nbytes > kBlock; at += kBlock, nbytes -= kBlock) {
    take(at);
    if (nbytes <= 2 * kBlock) std::memcpy(last_, at + kBlock - kStripe, kStripe);
  }
  if (nbytes != 0) std::memcpy(waiting_ + held, at, nbytes);
}

std::string Digest::hex() const {
  if (nbytes_ <= kShort) throw std::length_error("a digest of so few bytes is another");
  uint64_t lanes[8];
  std::copy(lanes_, lanes_ + 8, lanes);
  const size_t held = (nbytes_ - 1) % kBlock + 1;
  for (size_t i = 0; i < (held - 1) / kStripe; ++i) add(lanes, waiting_ + i * kStripe, kSecret + 8 * i);
  unsigned char end[kStripe];
  const size_t before = held < kStripe ? kStripe - held : 0;  // of the last stripe, which reaches into what was taken
  std::memcpy(end, last_ + held % kStripe, before);
  std::memcpy(end + before, waiting_ + held - (kStripe - before), kStripe - before);
  add(lanes, end, kSecret + kSecretBytes - kStripe - 7);
  const uint64_t halves[] = {merged(lanes, kSecret + kSecretBytes - 64 - 11, ~(nbytes_ * kPrime64[1])),
                             merged(lanes, kSecret + 11, nbytes_ * kPrime64[0])};
  std::string text;
  for (const uint64_t half : halves)
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[half >> shift & 15];
  return text;
}

std::string Digest::state() const {
  std::string state(sizeof(Digest), '\0');
  const size_t held = nbytes_ == 0 ? 0 : (nbytes_ - 1) % kBlock + 1;
  char* at = state.data();
  for (const auto& [from, n] :
       {std::pair<const void*, size_t>{lanes_, sizeof lanes_}, {last_, sizeof last_}, {waiting_, held}}) {
    std::memcpy(at, from, n);
    at += n;
  }
  std::memcpy(state.data() + sizeof lanes_ + sizeof last_ + sizeof waiting_, &nbytes_, sizeof nbytes_);
  return state;
}

Digest Digest::of_state(const std::string& state) {
  static_assert(sizeof(Digest) == sizeof lanes_ + sizeof last_ + sizeof waiting_ + sizeof nbytes_);
  if (state.size() != sizeof(Digest)) throw std::invalid_argument("this is no digest's state");
  Digest made;
  const char* at = state.data();
  for (const auto& [to, n] : {std::pair<void*, size_t>{made.lanes_, sizeof made.lanes_},
                              {made.last_, sizeof made.last_},
                              {made.waiting_, sizeof made.waiting_},
                              {&made.nbytes_, sizeof made.nbytes_}}) {
    std::memcpy(to, at, n);
    at += n;
  }
  return made;
}

}  // namespace offload::io
