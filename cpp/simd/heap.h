// The C library's heap.
#pragma once

#include <cstddef>

namespace offload {

// Whether freed memory stays with the process for the next block, which costs no page faults, or blocks of 1 MiB and
// more come from and go back to the kernel and the top of the heap is trimmed. Arenas are few. For the process, until
// the next call; returns whether every setting was taken.
bool keep_freed(bool kept);
// Gives free heap pages back now; true if any memory was.
bool trim();
// What is free in the heap, of which some may not be resident.
std::size_t freed_bytes();
// Resident memory of this process now; 0 where the kernel does not say.
std::size_t resident_bytes();

}  // namespace offload
