/* System calls that fail, or that kill the process, at the N-th of them below one folder.
 *
 * Loaded into a process with LD_PRELOAD. Nothing happens until disk_faults_arm is called. Calls on
 * paths outside of the folder, and on descriptors that were not opened below it, are not counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COUNT, KILL, TORN, FAIL, SHORT };
enum { CHANGES, READS };

static atomic_long counted;
static long wanted_call;
static int armed, wanted_how, wanted_error, wanted_stays, with_reads;
static char folder[4096];
static size_t folder_length;
static char below[1 << 16];

/* at: number of the call, from 1. how: see the enum. error: errno of FAIL. stays: from then on.
   reads: calls that change nothing are counted too. */
void disk_faults_arm(long at, int how, int error, int stays, int reads, const char *root) {
  atomic_store(&counted, 0);
  wanted_call = at, wanted_how = how, wanted_error = error, wanted_stays = stays;
  with_reads = reads;
  strncpy(folder, root, sizeof folder - 1);
  folder_length = strlen(folder);
  memset(below, 0, sizeof below);
  armed = 1;
}

long disk_faults_counted(void) { return atomic_load(&counted); }

static int under(int dirfd, const char *path) {
  if (!armed || path == NULL) return 0;
  if (path[0] == '/')
    return strncmp(path, folder, folder_length) == 0 &&
           (path[folder_length] == '/' || path[folder_length] == 0);
  if (dirfd == AT_FDCWD) return 1; /* commands run in the folder */
  return dirfd >= 0 && dirfd < (int)sizeof below && below[dirfd];
}

static int descriptor_under(int fd) {
  return armed && fd >= 0 && fd < (int)sizeof below && below[fd];
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* Whether this call is the one; KILL does not return. */
static int chosen(int kind) {
  if (kind == READS && !with_reads) return 0;
  long number = atomic_fetch_add(&counted, 1) + 1;
  if (wanted_how == COUNT) return 0;
  if (number != wanted_call && !(wanted_stays && number > wanted_call)) return 0;
  if (wanted_how == KILL) die();
  return 1;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* For calls other than writes: TORN and SHORT have no half of them, so TORN kills before the call. */
#define GATE(kind) \
  do { \
    if (chosen(kind)) { \
      if (wanted_how == TORN) die(); \
      if (wanted_how == FAIL) { errno = wanted_error; return -1; } \
    } \
  } while (0)

static int opened(int fd) {
  if (fd >= 0 && fd < (int)sizeof below) below[fd] = 1;
  return fd;
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    if (!under(AT_FDCWD, path)) return real(path, flags, mode); \
    GATE((flags & (O_WRONLY | O_RDWR | O_CREAT)) ? CHANGES : READS); \
    return opened(real(path, flags, mode)); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int dirfd, const char *path, int flags, ...) { \
    REAL(name); \
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    if (!under(dirfd, path)) return real(dirfd, path, flags, mode); \
    GATE((flags & (O_WRONLY | O_RDWR | O_CREAT)) ? CHANGES : READS); \
    return opened(real(dirfd, path, flags, mode)); \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < (int)sizeof below) below[fd] = 0;
  return real(fd);
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  if (descriptor_under(fd) && chosen(CHANGES)) {
    if (wanted_how == FAIL) { errno = wanted_error; return -1; }
    ssize_t half = real(fd, data, size > 1 ? size / 2 : size);
    if (wanted_how == TORN) die();
    return half;
  }
  return real(fd, data, size);
}

ssize_t read(int fd, void *data, size_t size) {
  REAL(read);
  if (descriptor_under(fd)) GATE(READS);
  return real(fd, data, size);
}

ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
  REAL(sendfile);
  if (descriptor_under(out)) GATE(CHANGES);
  return real(out, in, offset, size);
}

#define ON_DESCRIPTOR(name, ...) \
  if (descriptor_under(fd)) GATE(CHANGES); \
  return real(__VA_ARGS__)

int fsync(int fd) { REAL(fsync); ON_DESCRIPTOR(fsync, fd); }
int fdatasync(int fd) { REAL(fdatasync); ON_DESCRIPTOR(fdatasync, fd); }
int fchmod(int fd, mode_t mode) { REAL(fchmod); ON_DESCRIPTOR(fchmod, fd, mode); }
int ftruncate64(int fd, off_t size) { REAL(ftruncate64); ON_DESCRIPTOR(ftruncate64, fd, size); }
int flock(int fd, int how);
int flock(int fd, int how) { REAL(flock); ON_DESCRIPTOR(flock, fd, how); }

#define ON_PATH(at, path, ...) \
  if (under(at, path)) GATE(CHANGES); \
  return real(__VA_ARGS__)

int mkdir(const char *p, mode_t m) { REAL(mkdir); ON_PATH(AT_FDCWD, p, p, m); }
int mkdirat(int d, const char *p, mode_t m) { REAL(mkdirat); ON_PATH(d, p, d, p, m); }
int rmdir(const char *p) { REAL(rmdir); ON_PATH(AT_FDCWD, p, p); }
int unlink(const char *p) { REAL(unlink); ON_PATH(AT_FDCWD, p, p); }
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); ON_PATH(d, p, d, p, f); }
int chmod(const char *p, mode_t m) { REAL(chmod); ON_PATH(AT_FDCWD, p, p, m); }
int symlink(const char *to, const char *p) { REAL(symlink); ON_PATH(AT_FDCWD, p, to, p); }
int rename(const char *a, const char *b) { REAL(rename); ON_PATH(AT_FDCWD, b, a, b); }
int renameat(int c, const char *a, int d, const char *b) {
  REAL(renameat);
  ON_PATH(d, b, c, a, d, b);
}
int renameat2(int c, const char *a, int d, const char *b, unsigned f) {
  REAL(renameat2);
  ON_PATH(d, b, c, a, d, b, f);
}
int link(const char *a, const char *b) { REAL(link); ON_PATH(AT_FDCWD, b, a, b); }
int linkat(int c, const char *a, int d, const char *b, int f) {
  REAL(linkat);
  ON_PATH(d, b, c, a, d, b, f);
}
