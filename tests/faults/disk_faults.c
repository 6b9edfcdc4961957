/* Lets the nth write or fsync of a file whose path has a given text in it fail, once or from then on.
   Preloaded into the process under test, which arms it through ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2 };
static char wanted[512];
static int armed, forever, error_number;
static long nth, seen;

void fault_arm(const char *part, int op, long at, int always, int number) {
    snprintf(wanted, sizeof wanted, "%s", part);
    nth = at; seen = 0; forever = always; error_number = number; armed = op;
}

/* How often the armed operation was called; disarms. */
long fault_disarm(void) { armed = 0; return seen; }

static int fails(int fd, int op) {
    char link[64], path[1024];
    if (armed != op) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    if (!strstr(path, wanted)) return 0;
    seen++;
    if (seen == nth || (forever && seen > nth)) { errno = error_number; return 1; }
    return 0;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    return fails(fd, WRITE) ? -1 : real(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    return fails(fd, WRITE) ? -1 : real(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    return fails(fd, WRITE) ? -1 : real(fd, data, size, at);
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return fails(fd, WRITE) ? -1 : real(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return fails(fd, WRITE) ? -1 : real(fd, size);
}
int fsync(int fd) {
    REAL(fsync);
    return fails(fd, SYNC) ? -1 : real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return fails(fd, SYNC) ? -1 : real(fd);
}
