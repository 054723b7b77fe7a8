/* A file layer that fails on purpose: cc -shared -fPIC -O1 -o faults.so faults.c -ldl, then LD_PRELOAD=faults.so.

   What it does is in the environment, and is looked up at every call, so that a forked process may set it:

     FAULTS_FOLDER   only what happens below it is looked at (an absolute path without symbolic links)
     FAULTS_LOG      a file that gets a line for every operation there: its kind, a space, the path
     FAULTS_KIND     of the operation that fails: open, read, write, fsync, rename, unlink or mkdir
     FAULTS_NAME     the path, from FAULTS_FOLDER on; a pattern of fnmatch(3)
     FAULTS_NTH      which of those with this kind and name; the first is 1. Counted over all processes
     FAULTS_ERROR    a number for errno, or "kill": the process kills itself, in a write after half of the bytes;
                     or "short": a read brings half of the bytes that it could
     FAULTS_LASTS    when set, what could fail for the same reason fails from then on: the disk stays full
     FAULTS_COUNT    a file for counting them
     FAULTS_FIRED    a file that is written when it happens: the number of the process                      */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define TORN (-1) /* what `fault` returns where the process is to die */
#define SHORT (-2) /* and where a read is to bring less */

static int is_of_use(const char *text) { return text && *text; }

/* A line at the end of a file, by calls that are not among those below. */
static void note(const char *path, const char *text) {
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file >= 0) {
        syscall(SYS_write, file, text, strlen(text));
        syscall(SYS_close, file);
    }
}

/* The path of `name` below FAULTS_FOLDER, or NULL. A name that is not absolute is one in the folder of `base`. */
static const char *below(int base, const char *name, char path[PATH_MAX]) {
    const char *folder = getenv("FAULTS_FOLDER");
    if (!is_of_use(folder)) return NULL;
    if (name && name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char link[64], place[PATH_MAX];
        if (base == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", base);
        ssize_t length = readlink(link, place, sizeof place - 1);
        if (length < 0) return NULL;
        place[length] = 0;
        if (snprintf(path, PATH_MAX, name ? "%s/%s" : "%s", place, name) >= PATH_MAX) return NULL;
    }
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && path[length] == '/' ? path + length + 1 : NULL;
}

/* One more has come: how many there are. Appending is atomic, so no two processes get the same number. */
static int count(void) {
    int file = (int)syscall(SYS_openat, AT_FDCWD, getenv("FAULTS_COUNT"), O_WRONLY | O_CREAT | O_APPEND, 0666);
    syscall(SYS_write, file, ".", 1);
    int number = (int)syscall(SYS_lseek, file, 0, SEEK_CUR);
    syscall(SYS_close, file);
    return number;
}

static int strike(int error) {
    char text[32];
    snprintf(text, sizeof text, "%d\n", (int)getpid());
    note(getenv("FAULTS_FIRED"), text);
    return error;
}

/* Whether a disk that is full or can't be written to fails this operation, too. */
static int is_alike(int error, const char *kind, int makes) {
    if (!strcmp(kind, "read")) return 0;
    if (error == EROFS) return strcmp(kind, "fsync") && (makes || strcmp(kind, "open"));
    return !strcmp(kind, "write") || !strcmp(kind, "mkdir") || (!strcmp(kind, "open") && makes);
}

/* 0: go on. Else what errno is to be, or TORN. makes: for open, whether it may make or change the file. */
static int fault(const char *kind, int base, const char *name, int makes) {
    char path[PATH_MAX], line[PATH_MAX + 16];
    const char *here = below(base, name, path), *log = getenv("FAULTS_LOG"), *wanted = getenv("FAULTS_KIND");
    if (!here) return 0;
    if (is_of_use(log)) {
        snprintf(line, sizeof line, "%s %s\n", kind, here);
        note(log, line);
    }
    if (!is_of_use(wanted)) return 0;
    const char *error = getenv("FAULTS_ERROR");
    int number = !strcmp(error, "kill") ? TORN : !strcmp(error, "short") ? SHORT : atoi(error);
    if (!access(getenv("FAULTS_FIRED"), F_OK)) return is_of_use(getenv("FAULTS_LASTS")) && is_alike(number, kind, makes) ? number : 0;
    if (strcmp(kind, wanted) || fnmatch(getenv("FAULTS_NAME"), here, 0)) return 0;
    if (count() != atoi(getenv("FAULTS_NTH"))) return 0;
    return strike(number);
}

static int refuse(int error) {
    if (error == TORN) raise(SIGKILL);
    errno = error;
    return -1;
}

static int opened(int base, const char *name, int flags, mode_t mode) {
    int error = fault("open", base, name, (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) != 0);
    return error ? refuse(error) : (int)syscall(SYS_openat, base, name, flags, mode);
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPENS(function)                                      \
    int function(const char *name, int flags, ...) {         \
        va_list rest;                                        \
        va_start(rest, flags);                               \
        mode_t mode = mode_of(flags, rest);                  \
        va_end(rest);                                        \
        return opened(AT_FDCWD, name, flags, mode);          \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(function)                                   \
    int function(int base, const char *name, int flags, ...) {\
        va_list rest;                                        \
        va_start(rest, flags);                               \
        mode_t mode = mode_of(flags, rest);                  \
        va_end(rest);                                        \
        return opened(base, name, flags, mode);              \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t read(int file, void *bytes, size_t count) {
    int error = fault("read", file, NULL, 0);
    return error && error != SHORT ? refuse(error) : syscall(SYS_read, file, bytes, error && count > 1 ? count / 2 : count);
}

ssize_t pread(int file, void *bytes, size_t count, off_t offset) {
    int error = fault("read", file, NULL, 0);
    return error && error != SHORT ? refuse(error) : syscall(SYS_pread64, file, bytes, error && count > 1 ? count / 2 : count, offset);
}

ssize_t pread64(int file, void *bytes, size_t count, off64_t offset) {
    return pread(file, bytes, count, offset);
}

/* Of one part, as all of ours are; of several the first alone where it is to be short. */
ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    int error = fault("read", file, NULL, 0);
    struct iovec half = {parts->iov_base, parts->iov_len > 1 ? parts->iov_len / 2 : parts->iov_len};
    if (error == SHORT) return syscall(SYS_preadv2, file, &half, 1, (long)offset, 0L, flags);
    return error ? refuse(error) : syscall(SYS_preadv2, file, parts, count, (long)offset, 0L, flags);
}

ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t offset) {
    return preadv64v2(file, parts, count, offset, 0);
}

size_t fread(void *bytes, size_t size, size_t count, FILE *file) {
    int error = fileno(file) > 2 ? fault("read", fileno(file), NULL, 0) : 0;
    if (!error || error == SHORT) return REAL(fread)(bytes, size, error && count > 1 ? count / 2 : count, file);
    refuse(error);
    return 0;
}

ssize_t write(int file, const void *bytes, size_t count) {
    int error = fault("write", file, NULL, 1);
    if (error == TORN) syscall(SYS_write, file, bytes, count / 2);
    return error ? refuse(error) : syscall(SYS_write, file, bytes, count);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t offset) {
    int error = fault("write", file, NULL, 1);
    if (error == TORN) syscall(SYS_pwrite64, file, bytes, count / 2, offset);
    return error ? refuse(error) : syscall(SYS_pwrite64, file, bytes, count, offset);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t offset) {
    return pwrite(file, bytes, count, offset);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    int error = fault("write", file, NULL, 1);
    if (error == TORN) syscall(SYS_writev, file, parts, count / 2);
    return error ? refuse(error) : syscall(SYS_writev, file, parts, count);
}

size_t fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    int error = fileno(file) > 2 ? fault("write", fileno(file), NULL, 1) : 0;
    if (error == TORN) {
        REAL(fwrite)(bytes, size, count / 2, file);
        fflush(file);
    }
    if (!error) return REAL(fwrite)(bytes, size, count, file);
    refuse(error);
    return 0;
}

/* The disk need not have it: what is looked at is what a program makes of a failure. */
int fsync(int file) {
    int error = fault("fsync", file, NULL, 1);
    return error ? refuse(error) : 0;
}

int rename(const char *from, const char *to) {
    int error = fault("rename", AT_FDCWD, to, 1);
    return error ? refuse(error) : (int)syscall(SYS_rename, from, to);
}

int unlink(const char *name) {
    int error = fault("unlink", AT_FDCWD, name, 1);
    return error ? refuse(error) : (int)syscall(SYS_unlink, name);
}

int unlinkat(int base, const char *name, int flags) {
    int error = fault("unlink", base, name, 1);
    return error ? refuse(error) : (int)syscall(SYS_unlinkat, base, name, flags);
}

int mkdir(const char *name, mode_t mode) {
    int error = fault("mkdir", AT_FDCWD, name, 1);
    return error ? refuse(error) : (int)syscall(SYS_mkdir, name, mode);
}
