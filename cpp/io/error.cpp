#include "io/error.h"

#include <cerrno>
#include <system_error>

namespace offload::io {

namespace {

const char* errno_name(int code) {
  switch (code) {
    case EACCES:
      return "EACCES";
    case EAGAIN:
      return "EAGAIN";
    case EDQUOT:
      return "EDQUOT";
    case EFBIG:
      return "EFBIG";
    case EINTR:
      return "EINTR";
    case EINVAL:
      return "EINVAL";
    case EIO:
      return "EIO";
    case ENOENT:
      return "ENOENT";
    case ENOSPC:
      return "ENOSPC";
    case EPERM:
      return "EPERM";
    case ETIMEDOUT:
      return "ETIMEDOUT";
    case EROFS:
      return "EROFS";
    default:
      return nullptr;
  }
}

}  // namespace

std::string errno_text(int code) {
  const char* name = errno_name(code);
  return std::generic_category().message(code) + " (" + (name ? name : "errno " + std::to_string(code)) + ")";
}

std::string way_out(int code) {
  if (code == ENOSPC || code == EDQUOT) return "free space there, give it less or use another directory";
  if (code == EROFS || code == EACCES || code == EPERM) return "make it writable or use another directory";
  if (code == ENOMEM) return "end other processes or give this one less memory";
  return "check the drive (dmesg, smartctl -a) or use another directory";
}

}  // namespace offload::io
