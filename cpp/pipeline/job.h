// What is to be done to one chunk of state: bytes to read, arrays to update, bytes to write back.
#pragma once

#include <cstdint>
#include <vector>

#include "io/channel.h"
#include "simd/update.h"

namespace offload {

// Bytes of a file and where they are in the job's frame. A read that is `late` waits until its batch has begun.
struct Move {
  io::Channel channel;
  uint64_t file_offset;
  uint64_t frame_offset;
  uint64_t nbytes;
  bool late = false;
};

enum class Base : int { kAbsent = -1, kAddress = 0, kFrame = 1 };

// An array: at an address, at an offset of the job's frame, or nowhere.
struct Place {
  Base base;
  uint64_t offset;

  void* resolve(char* frame) const {
    if (base == Base::kAbsent) return nullptr;
    return base == Base::kFrame ? frame + offset : reinterpret_cast<void*>(static_cast<uintptr_t>(offset));
  }
};

constexpr Place kNowhere{Base::kAbsent, 0};

// n elements of one parameter. Absent: what the job's form and rule do not have (see Arrays), and `out` at will.
struct Segment {
  size_t hyper;
  uint64_t n;
  Place master, grad, exp_avg, exp_avg_sq, out;
  Place low = kNowhere, exp_avg_scale = kNowhere, exp_avg_sq_scale = kNowhere;
  uint64_t first = 0;  // the number of the first element in its parameter, a multiple of kGroup
};

// A job with neither reads nor writes takes no frame.
struct Job {
  std::vector<Move> reads;
  std::vector<Segment> segments;
  std::vector<Move> writes;
  Dtype grad_dtype = Dtype::f32;
  Dtype out_dtype = Dtype::f32;
  Rule rule = Rule::adam;  // also of the hyper-parameters it is submitted with
  Master master = Master::f32;
  Moments moments = Moments::f32;
  size_t number = 0;  // the pipeline's

  Form form() const { return {master, moments, grad_dtype, out_dtype}; }
  bool needs_frame() const { return !reads.empty() || !writes.empty(); }
  const Move* late_read() const;  // the only one; null where there is none, or several
};

// Throws std::invalid_argument when the job reaches outside a frame or a file, or an array is missing or misaligned.
void check(const Job& job, uint64_t frame_bytes);

// Updates a job's segments, whose frame is `frame` (null for a job without). `late`: where the bytes of its late read
// are, if not in the frame.
void update(const Job& job, const std::vector<Hyper>& hypers, char* frame, ThreadPool& pool, char* late = nullptr);

}  // namespace offload
