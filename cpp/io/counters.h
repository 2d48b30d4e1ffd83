// What an engine has done and has under way.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace offload::io {

// Microseconds in buckets whose width is an eighth of their lower bound or less.
class Histogram {
 public:
  void add(uint64_t us) {
    ++counts_[bucket(us)];
    ++count_;
    max_ = std::max(max_, us);
  }

  Histogram& operator+=(const Histogram& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    count_ += other.count_;
    max_ = std::max(max_, other.max_);
    return *this;
  }

  uint64_t count() const { return count_; }
  uint64_t max() const { return max_; }

  // An upper bound of the `percent` smallest in a hundred, at most an eighth too high; 0 where nothing was added.
  uint64_t percentile(unsigned percent) const {
    const uint64_t rank = (count_ * percent + 99) / 100;
    uint64_t seen = 0;
    for (size_t i = 0; i < counts_.size() && count_ != 0; ++i) {
      seen += counts_[i];
      if (seen >= rank && seen != 0) return std::min(last_of(i), max_);
    }
    return max_;
  }

 private:
  static constexpr unsigned kBits = 3;
  static constexpr size_t kParts = 1u << kBits;

  static size_t bucket(uint64_t us) {
    if (us < kParts) return us;
    const auto exponent = static_cast<unsigned>(63 - __builtin_clzll(us));
    return (exponent - kBits + 1) * kParts + ((us >> (exponent - kBits)) & (kParts - 1));
  }
  static uint64_t last_of(size_t index) {
    if (index < kParts) return index;
    const auto shift = static_cast<unsigned>(index / kParts - 1);
    return ((kParts + index % kParts + 1) << shift) - 1;
  }

  std::array<uint64_t, (64 - kBits + 1) * kParts> counts_ = {};
  uint64_t count_ = 0;
  uint64_t max_ = 0;
};

struct Counters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t bytes_verified = 0;  // of those read, compared with their sums
  uint64_t requests = 0;        // transfers completed
  uint64_t pieces = 0;          // of which they were made, each a request to the kernel or more
  uint64_t retries = 0;         // interrupted, refused for now, or short
  uint64_t in_flight = 0;       // pieces that the kernel has now
  uint64_t in_flight_max = 0;
  uint64_t waiting = 0;  // transfers queued now, of which nothing or not all was handed to the kernel
  uint64_t waiting_max = 0;
  Histogram read_us;  // a piece's time with the kernel
  Histogram write_us;

  // Of several engines side by side.
  Counters& operator+=(const Counters& other) {
    bytes_read += other.bytes_read;
    bytes_written += other.bytes_written;
    bytes_verified += other.bytes_verified;
    requests += other.requests;
    pieces += other.pieces;
    retries += other.retries;
    in_flight += other.in_flight;
    in_flight_max += other.in_flight_max;
    waiting += other.waiting;
    waiting_max += other.waiting_max;
    read_us += other.read_us;
    write_us += other.write_us;
    return *this;
  }
};

}  // namespace offload::io
