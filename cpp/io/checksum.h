// CRC-32C of a stretch of memory, by the processor's own instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::io {

// [Note: lanes]
// The 8-byte words of the whole 32-byte groups go to four CRCs in turn, which the processor computes side by side; what
// is left goes to the first; the sum is the CRC of the four. As with one CRC any error within 32 bits in a row of a
// lane is caught, any other but for one in 2^32. Every way of computing it gives the same sum.
uint32_t checksum(const void* data, size_t nbytes);

// The same by tables, as on a processor without the instruction.
uint32_t checksum_by_table(const void* data, size_t nbytes);

// "sse4.2", "armv8" or "table": what checksum() uses here.
const char* checksum_way();

}  // namespace offload::io
