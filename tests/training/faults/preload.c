// Fails one call of a process to the system, for tests of what the process does then.
//
// Counted are calls on files whose path contains FAULT_UNDER. The call with the number FAULT_AT fails as FAULT says:
// `kill` ends the process before it, `short` writes half of it, and a number is its error. With `memory`, requests for
// memory are counted instead, and those from FAULT_AT on are refused. With FAULT_ONLY, only calls of this function are
// counted. FAULT_LOG is a file of eight bytes, the number of calls so far.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static _Atomic long *count;
static long at;
static int error_of_fault;
static int is_short, is_memory;
static const char *under, *only;

// Descriptors of counted files.
static unsigned char counted[4096];

__attribute__((constructor)) static void start(void) {
  const char *log = getenv("FAULT_LOG"), *number = getenv("FAULT_AT"), *fault = getenv("FAULT");
  under = getenv("FAULT_UNDER");
  only = getenv("FAULT_ONLY");
  if (!log || !number || !fault || !under) return;
  at = atol(number);
  is_short = strcmp(fault, "short") == 0;
  is_memory = strcmp(fault, "memory") == 0;
  error_of_fault = strcmp(fault, "kill") == 0 ? -1 : atoi(fault);
  int file = syscall(SYS_openat, AT_FDCWD, log, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || syscall(SYS_ftruncate, file, sizeof *count) != 0) return;
  void *shared = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared != MAP_FAILED) count = shared;
}

// Counts a call of a function, and returns whether it fails.
static int fails(const char *function) {
  if (!count || is_memory || (only && strcmp(only, function) != 0)) return 0;
  if (atomic_fetch_add(count, 1) + 1 != at) return 0;
  if (error_of_fault == -1) syscall(SYS_kill, getpid(), SIGKILL);
  errno = error_of_fault;
  return 1;
}

void *mmap64(void *place, size_t length, int protection, int flags, int file, off64_t offset) {
  if (count && is_memory && (flags & MAP_ANONYMOUS) && atomic_fetch_add(count, 1) + 1 >= at) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void *)syscall(SYS_mmap, place, length, protection, flags, file, offset);
}

void *mmap(void *place, size_t length, int protection, int flags, int file, off_t offset) {
  return mmap64(place, length, protection, flags, file, offset);
}

static int is_under(const char *path) { return count && path && strstr(path, under); }

static int opened(const char *path, int flags, mode_t mode) {
  int is_counted = is_under(path);
  if (is_counted && fails("open") && !is_short) return -1;
  int file = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
  if (file >= 0 && file < (int)sizeof counted) counted[file] = is_counted;
  return file;
}

int open(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, int);
  va_end(rest);
  return opened(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, int);
  va_end(rest);
  return opened(path, flags, mode);
}

static int is_counted(int file) { return file >= 0 && file < (int)sizeof counted && counted[file]; }

int close(int file) {
  if (is_counted(file)) counted[file] = 0;
  return syscall(SYS_close, file);
}

ssize_t write(int file, const void *bytes, size_t length) {
  if (is_counted(file) && fails("write")) {
    if (!is_short) return -1;
    length = length > 1 ? length / 2 : length;
  }
  return syscall(SYS_write, file, bytes, length);
}

int fsync(int file) {
  if (is_counted(file) && fails("fsync") && !is_short) return -1;
  return syscall(SYS_fsync, file);
}

int ftruncate64(int file, off64_t length) {
  if (is_counted(file) && fails("ftruncate64") && !is_short) return -1;
  return syscall(SYS_ftruncate, file, length);
}

int rename(const char *from, const char *to) {
  if (is_under(to) && fails("rename") && !is_short) return -1;
  return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *path, mode_t mode) {
  if (is_under(path) && fails("mkdir") && !is_short) return -1;
  return syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int unlinkat(int folder, const char *path, int flags) {
  // Entries of a folder that is removed have no path of their own.
  if (count && strstr(path, "tensors-") && fails("unlinkat") && !is_short) return -1;
  return syscall(SYS_unlinkat, folder, path, flags);
}
