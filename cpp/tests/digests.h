// What digests_test must find on every machine. A change here is a change of numbers: it belongs into the changelog.
#pragma once

#include <cstdint>

struct ExpectedDigest {
  const char* name;
  std::uint32_t digest;
};

constexpr ExpectedDigest kDigests[] = {
    {"checksum", 0x990c1a94},
    {"update adam fp32 fp32", 0x46ede92b},
    {"update adam fp32 bf16", 0x46fa6faa},
    {"update adam fp32 int8", 0x546f9123},
    {"update adam split fp32", 0xd3dbe658},
    {"update adam split bf16", 0x098542b1},
    {"update adam split int8", 0x81c431ea},
    {"update lion fp32 fp32", 0x46b195ad},
    {"update lion fp32 bf16", 0x722cd535},
    {"update lion fp32 int8", 0x7cd6277f},
    {"update lion split fp32", 0xa96848bb},
    {"update lion split bf16", 0x970bc28d},
    {"update lion split int8", 0x65e81286},
    {"update adagrad fp32 fp32", 0x19b88406},
    {"update adagrad fp32 bf16", 0x1b774678},
    {"update adagrad fp32 int8", 0x505d3d47},
    {"update adagrad split fp32", 0x9fda80b0},
    {"update adagrad split bf16", 0xc4dc5e56},
    {"update adagrad split int8", 0x6039cde5},
    {"land fp32 from fp32", 0xb63fa5d7},
    {"land fp32 from bf16", 0xb8b66036},
    {"land fp32 from fp16", 0x9355accd},
    {"land bf16 from fp32", 0x4a01b7aa},
    {"land bf16 from bf16", 0x57d46d20},
    {"land bf16 from fp16", 0x53060736},
    {"land fp16 from fp32", 0x3a316214},
    {"land fp16 from bf16", 0xd29139ff},
    {"land fp16 from fp16", 0x0cd65fea},
    {"convert fp32 to fp32", 0xe453b142},
    {"convert fp32 to bf16", 0x6e786d79},
    {"convert fp32 to fp16", 0x566df277},
    {"convert bf16 to fp32", 0xae2ea316},
    {"convert bf16 to bf16", 0x158df05b},
    {"convert bf16 to fp16", 0x778c3d4e},
    {"convert fp16 to fp32", 0xa5ac6892},
    {"convert fp16 to bf16", 0x6815d467},
    {"convert fp16 to fp16", 0x158df05b},
    {"split and join", 0xe0ba3bc1},
    {"encode and decode with sign", 0x107411a8},
    {"encode and decode without", 0x62fe5f62},
};
