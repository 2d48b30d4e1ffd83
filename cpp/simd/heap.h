// The C library's heap, which keeps freed activations unless told not to.
#pragma once

namespace offload {

// Blocks of 1 MiB and more come from and go back to the kernel, the top of the heap is trimmed, arenas are few. Fixed
// for the process; returns whether every setting was taken.
bool tune_malloc();
// Gives free heap pages back now; true if any memory was.
bool trim();

}  // namespace offload
