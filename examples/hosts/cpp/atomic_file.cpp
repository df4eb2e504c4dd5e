#include "atomic_file.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(_WIN32)
#if !defined(NOMINMAX)
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace {

// One call writes at most this many bytes: Linux and macOS stop at 2 GB.
constexpr size_t kMostBytes = size_t{1} << 30;

}  // namespace

void AtomicFile::fail(const char* doing) const {
#if defined(_WIN32)
  const std::error_code reason(static_cast<int>(GetLastError()), std::system_category());
#else
  const std::error_code reason(errno, std::generic_category());
#endif
  throw std::runtime_error(std::string(doing) + " '" + temporary_.string() + "' failed: " + reason.message() +
                           "; the old file is unchanged");
}

AtomicFile::~AtomicFile() {
  close();
  if (!temporary_.empty()) {
    std::error_code ignored;
    std::filesystem::remove(temporary_, ignored);
  }
}

#if defined(_WIN32)

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path), temporary_(path) {
  temporary_ += L".tmp";
  file_ = CreateFileW(temporary_.c_str(), GENERIC_WRITE, 0, nullptr, CREATE_ALWAYS, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file_ == INVALID_HANDLE_VALUE) fail("creating");
}

void AtomicFile::write(const void* bytes, size_t count) {
  for (const char* place = static_cast<const char*>(bytes); count != 0;) {
    DWORD written = 0;
    const auto part = static_cast<DWORD>(std::min(count, kMostBytes));
    if (!WriteFile(file_, place, part, &written, nullptr)) fail("writing");
    place += written;
    count -= written;
  }
}

void AtomicFile::commit() {
  if (!FlushFileBuffers(file_)) fail("flushing");
  close();
  // MOVEFILE_WRITE_THROUGH returns after the rename is on the disk. Windows cannot flush folders.
  if (!MoveFileExW(temporary_.c_str(), path_.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) fail("renaming");
  temporary_.clear();
}

void AtomicFile::close() {
  if (file_ != INVALID_HANDLE_VALUE) CloseHandle(file_);
  file_ = INVALID_HANDLE_VALUE;
}

#else

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path), temporary_(path) {
  temporary_ += ".tmp";
  file_ = open(temporary_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
  if (file_ < 0) fail("creating");
}

void AtomicFile::write(const void* bytes, size_t count) {
  for (const char* place = static_cast<const char*>(bytes); count != 0;) {
    const ssize_t written = ::write(file_, place, std::min(count, kMostBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("writing");
    place += written;
    count -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  // Otherwise a loss of power may leave the new name without its content.
#if defined(__APPLE__)
  // fsync leaves the bytes in the cache of the disk; not every file system has F_FULLFSYNC.
  if (fcntl(file_, F_FULLFSYNC) != 0 && fsync(file_) != 0) fail("flushing");
#else
  if (fsync(file_) != 0) fail("flushing");
#endif
  close();
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("renaming");
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  temporary_.clear();
  // The new file is complete. Network file systems refuse to flush folders, which is no reason to fail.
  const int directory = open(folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (directory < 0) return;
  fsync(directory);
  ::close(directory);
}

void AtomicFile::close() {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

#endif
