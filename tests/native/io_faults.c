// Test shim for LD_PRELOAD: lets chosen calls of chosen file operations fail.
//
// The process under test calls io_faults_set (through ctypes); until then everything goes through. Files are matched
// by the end of their path.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAULT_WRITE = 1, FAULT_READ = 2, FAULT_ALLOCATE = 4, FAULT_DIRECT = 8, FAULT_OPEN = 16, FAULT_SHORT = 32 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char suffix[256];
static int operations, error_number;
static unsigned long which, seen;

// Of the operations named on files that end in `end`, the n-th from now fails with `error` where bit n of `calls` is
// set; bit 63 stands for all later ones.
// FAULT_SHORT beside FAULT_WRITE: half of the bytes are written before the failure.
__attribute__((visibility("default"))) void io_faults_set(int ops, const char* end, unsigned long calls, int error) {
    pthread_mutex_lock(&lock);
    snprintf(suffix, sizeof suffix, "%s", end);
    operations = ops, which = calls, error_number = error, seen = 0;
    pthread_mutex_unlock(&lock);
}

static int strikes_path(int op, const char* path) {
    int struck = 0;
    pthread_mutex_lock(&lock);
    size_t n = strlen(path), m = strlen(suffix);
    if ((operations & op) && n >= m && strcmp(path + n - m, suffix) == 0) {
        if (which >> (seen < 63 ? seen : 63) & 1) struck = error_number;
        ++seen;
    }
    pthread_mutex_unlock(&lock);
    return struck;
}

static int strikes(int op, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strikes_path(op, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t fail(int error) {
    errno = error;
    return -1;
}

#define SHIM_WRITE(name, off)                                                  \
    ssize_t name(int file, const void* data, size_t bytes, off offset) {       \
        int error = strikes(FAULT_WRITE, file);                                \
        if (error && (operations & FAULT_SHORT))                               \
            NEXT(name)(file, data, bytes / 2 / 4096 * 4096, offset);           \
        return error ? fail(error) : NEXT(name)(file, data, bytes, offset);    \
    }
#define SHIM_READ(name, off)                                                   \
    ssize_t name(int file, void* data, size_t bytes, off offset) {             \
        int error = strikes(FAULT_READ, file);                                 \
        return error ? fail(error) : NEXT(name)(file, data, bytes, offset);    \
    }
#define SHIM_VECTOR(name, op, off)                                             \
    ssize_t name(int file, const struct iovec* parts, int count, off offset) { \
        int error = strikes(op, file);                                         \
        return error ? fail(error) : NEXT(name)(file, parts, count, offset);   \
    }
#define SHIM_VECTOR2(name, op, off)                                            \
    ssize_t name(int file, const struct iovec* parts, int count, off offset, int flags) { \
        int error = strikes(op, file);                                         \
        return error ? fail(error) : NEXT(name)(file, parts, count, offset, flags); \
    }
#define SHIM_ALLOCATE(name, off)                                               \
    int name(int file, off offset, off bytes) {                                \
        int error = strikes(FAULT_ALLOCATE, file);                             \
        return error ? error : NEXT(name)(file, offset, bytes);                \
    }
#define SHIM_OPEN(name)                                                        \
    int name(const char* path, int flags, ...) {                               \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = va_arg(rest, mode_t);                                    \
        va_end(rest);                                                          \
        int error = strikes_path(flags & O_DIRECT ? FAULT_DIRECT : FAULT_OPEN, path); \
        return error ? (int)fail(error) : NEXT(name)(path, flags, mode);       \
    }

SHIM_WRITE(pwrite, off_t)
SHIM_WRITE(pwrite64, off64_t)
SHIM_READ(pread, off_t)
SHIM_READ(pread64, off64_t)
SHIM_VECTOR(pwritev, FAULT_WRITE, off_t)
SHIM_VECTOR(pwritev64, FAULT_WRITE, off64_t)
SHIM_VECTOR(preadv, FAULT_READ, off_t)
SHIM_VECTOR(preadv64, FAULT_READ, off64_t)
SHIM_VECTOR2(preadv2, FAULT_READ, off_t)
SHIM_VECTOR2(preadv64v2, FAULT_READ, off64_t)
SHIM_ALLOCATE(posix_fallocate, off_t)
SHIM_ALLOCATE(posix_fallocate64, off64_t)
SHIM_OPEN(open)
SHIM_OPEN(open64)
