// XXH3-128 of a long stream, which can go on in another process: what it is so far fits in a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace offload::io {

// The algorithm is Yann Collet's, as its specification has it for inputs of more than 240 bytes, with its own secret
// and seed 0: the same digest as xxhash's xxh3_128 of all that was given, in whatever parts.
class Digest {
 public:
  Digest() noexcept;

  void update(const void* data, size_t nbytes) noexcept;
  // 32 hexadecimal digits. std::length_error of so few bytes that another algorithm is theirs.
  std::string hex() const;

  // All of it, and the same again. std::invalid_argument for what no digest has given.
  std::string state() const;
  static Digest of_state(const std::string& state);

 private:
  static constexpr size_t kStripe = 64;
  static constexpr size_t kBlock = 16 * kStripe;

  void take(const unsigned char* block) noexcept;

  uint64_t lanes_[8];
  unsigned char last_[kStripe] = {};    // the end of what was taken
  unsigned char waiting_[kBlock] = {};  // what is not: a block is taken only when more follows
  uint64_t nbytes_ = 0;
};

}  // namespace offload::io
