/* A stand-in for libcufile and libhipfile: the same functions over host memory, with the checks that the real ones make.

   Types and prototypes are those of cufile.h (CUDA 12.9) and hipfile.h (ROCm 7.2), written down again: where the real
   cufile.h is installed, test_direct_io.py compiles CHECK_CUFILE_H against it, so that they cannot drift apart. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef enum { SUCCESS = 0 } OpError;
typedef struct { OpError err; int driver; } Status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } Descriptor;

#ifdef CHECK_CUFILE_H
#include <cufile.h>
#define SAME(a, b) _Static_assert((a) == (b), #a " is not " #b)
SAME(sizeof(Status), sizeof(CUfileError_t));
SAME(offsetof(Status, driver), offsetof(CUfileError_t, cu_err));
SAME(sizeof(Descriptor), sizeof(CUfileDescr_t));
SAME(offsetof(Descriptor, handle), offsetof(CUfileDescr_t, handle));
SAME(offsetof(Descriptor, fs_ops), offsetof(CUfileDescr_t, fs_ops));
SAME(1, CU_FILE_HANDLE_TYPE_OPAQUE_FD);
SAME(5001, CU_FILE_DRIVER_NOT_INITIALIZED);
SAME(5007, CU_FILE_PLATFORM_NOT_SUPPORTED);
SAME(5008, CU_FILE_IO_NOT_SUPPORTED);
SAME(5009, CU_FILE_DEVICE_NOT_SUPPORTED);
SAME(5020, CU_FILE_DIO_NOT_SET);
SAME(5025, CU_FILE_PERMISSION_DENIED);
SAME(5033, CU_FILE_NVFS_SETUP_ERROR);
SAME(5034, CU_FILE_IO_DISABLED);
SAME(5036, CU_FILE_GPU_MEMORY_PINNING_FAILED);
static CUfileError_t (*driver_open)(void) = cuFileDriverOpen;
static CUfileError_t (*handle_register)(CUfileHandle_t *, CUfileDescr_t *) = cuFileHandleRegister;
static void (*handle_deregister)(CUfileHandle_t) = cuFileHandleDeregister;
static CUfileError_t (*buf_register)(const void *, size_t, int) = cuFileBufRegister;
static CUfileError_t (*buf_deregister)(const void *) = cuFileBufDeregister;
static ssize_t (*read_)(CUfileHandle_t, void *, size_t, off_t, off_t) = cuFileRead;
static ssize_t (*write_)(CUfileHandle_t, const void *, size_t, off_t, off_t) = cuFileWrite;
int used(void) { return driver_open && handle_register && handle_deregister && buf_register && buf_deregister && read_ && write_; }
#else

/* What the next calls do: an error code, or the most that one call transfers. Set by the tests. */
int standin_open_error, standin_register_error, standin_buffer_error, standin_io_error, standin_errno;
size_t standin_most;
/* What happened. */
int standin_handles, standin_buffers, standin_reads, standin_writes, standin_unregistered;

struct file { int fd; };
static struct { const char *base; size_t length; } buffers[256];

static Status status(int code) { Status s = {code, code == 5011 ? 101 : 0}; return s; }

static Status driver_open(const char *variable) {
    const char *allowed = getenv(variable);
    /* Without this the real ones would copy through the host and say nothing. */
    if (!allowed || strcmp(allowed, "false")) return status(5022);
    return status(standin_open_error);
}
static Status handle_register(void **out, Descriptor *d) {
    if (standin_register_error) return status(standin_register_error);
    if (d->type != 1 || d->fs_ops || d->handle.fd < 0) return status(5022);
    int flags = fcntl(d->handle.fd, F_GETFL);
    if (flags < 0) return status(5018);
    if (!(flags & O_DIRECT)) return status(5020);
    struct file *f = malloc(sizeof *f);
    f->fd = d->handle.fd;
    *out = f;
    standin_handles++;
    return status(0);
}
static void handle_deregister(void *h) { free(h); standin_handles--; }
static Status buf_register(const void *base, size_t length, int flags) {
    if (standin_buffer_error) return status(standin_buffer_error);
    if (flags || (uintptr_t)base % 4096) return status(5022);
    for (int i = 0; i < 256; i++)
        if (!buffers[i].base) { buffers[i].base = base; buffers[i].length = length; standin_buffers++; return status(0); }
    return status(5036);
}
static Status buf_deregister(const void *base) {
    for (int i = 0; i < 256; i++)
        if (buffers[i].base == base) { buffers[i].base = 0; standin_buffers--; return status(0); }
    return status(5024);
}
static ssize_t transfer(void *h, char *base, size_t size, off_t at, off_t skip, int writing) {
    int found = 0;
    if (standin_io_error) return -standin_io_error;
    if (standin_errno) { errno = standin_errno; return -1; }
    for (int i = 0; i < 256; i++)
        found |= buffers[i].base == base && (size_t)skip + size <= buffers[i].length;
    if (!found) standin_unregistered++;
    if (size % 4096 || at % 4096 || skip % 4096) return -5022;
    if (standin_most && size > standin_most) size = standin_most;
    if (writing) { standin_writes++; return pwrite(((struct file *)h)->fd, base + skip, size, at); }
    standin_reads++;
    return pread(((struct file *)h)->fd, base + skip, size, at);
}
#define LIBRARY(P, V) \
    Status P##DriverOpen(void) { return driver_open(V "_ALLOW_COMPAT_MODE"); } \
    Status P##HandleRegister(void **h, Descriptor *d) { return handle_register(h, d); } \
    void P##HandleDeregister(void *h) { handle_deregister(h); } \
    Status P##BufRegister(const void *b, size_t n, int f) { return buf_register(b, n, f); } \
    Status P##BufDeregister(const void *b) { return buf_deregister(b); } \
    ssize_t P##Read(void *h, void *b, size_t n, off_t at, off_t skip) { return transfer(h, b, n, at, skip, 0); } \
    ssize_t P##Write(void *h, const void *b, size_t n, off_t at, off_t skip) { return transfer(h, (char *)b, n, at, skip, 1); }
LIBRARY(cuFile, "CUFILE")
LIBRARY(hipFile, "HIPFILE")
#endif
