/* A stand-in for libcuda and libamdhip64: their virtual memory calls over host memory, with the signatures that the vendors'
 * documentation gives. It keeps the rules that the real ones do (sizes are multiples of the granularity, nothing is mapped
 * twice, a handle lives until it is both released and unmapped, access is set after mapping) and answers with their codes, so
 * that a caller who breaks one fails here too. Compiled by the test with -DCUDA or -DHIP. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULE (2ul << 20)
#define MOST 256
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101 };

typedef struct { int type, id; } location_t;
typedef struct { int type; int handles; location_t location; void *win32;
                 struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags; } prop_t;
typedef struct { location_t location; int flags; } access_t;
_Static_assert(sizeof(prop_t) == 32 && sizeof(access_t) == 12, "as in cuda.h and hip_runtime_api.h");

static struct { int fd, released, maps; } handles[MOST];
static struct { uint64_t at; int handle, readable; } mapped[MOST];
static uint64_t reserved_at, reserved_size;
static _Thread_local int current = -1;
static int initialized, live, fail_map_at = -1, mappings;
size_t stand_in_room = 1ul << 40;               /* bytes of the "device"; the test changes it */
void stand_in_fail_map(int n) { fail_map_at = n; mappings = 0; }
int stand_in_live(void) { return live; }

static int ready(void) { return current < 0 ? NOT_INITIALIZED : OK; }
static int sound(const prop_t *p) {
    return p && p->type == 1 && p->location.type == 1 && p->location.id == current && !p->flags.usage;
}
static int find(uint64_t at) { for (int i = 0; i < MOST; i++) if (mapped[i].at == at) return i; return -1; }
static void drop(int h) { if (handles[h].released && !handles[h].maps) { close(handles[h].fd); handles[h].fd = 0; live--; } }

static int granularity(size_t *out, const prop_t *p, int option) {
    if (ready()) return NOT_INITIALIZED;
    if (!sound(p) || option > 1) return INVALID_VALUE;
    *out = GRANULE; return OK;
}
static int reserve(uint64_t *out, size_t size, size_t align, uint64_t hint, unsigned long long flags) {
    if (size % GRANULE || !size || flags || align % GRANULE || hint) return INVALID_VALUE;
    char *raw = mmap(0, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return OUT_OF_MEMORY;
    reserved_at = ((uint64_t)raw + GRANULE - 1) / GRANULE * GRANULE; reserved_size = size;
    *out = reserved_at; return OK;
}
static int address_free(uint64_t at, size_t size) {
    if (at != reserved_at || size != reserved_size) return INVALID_VALUE;
    for (int i = 0; i < MOST; i++) if (mapped[i].at) return INVALID_VALUE;
    munmap((void *)at, size); reserved_at = reserved_size = 0; return OK;
}
static int create(uint64_t *out, size_t size, const prop_t *p, unsigned long long flags) {
    if (ready()) return NOT_INITIALIZED;
    if (!sound(p) || size != GRANULE || flags) return INVALID_VALUE;
    if ((live + 1) * GRANULE > stand_in_room) return OUT_OF_MEMORY;
    for (int h = 1; h < MOST; h++) if (!handles[h].fd) {
        handles[h].fd = memfd_create("stand-in", 0); handles[h].released = handles[h].maps = 0;
        if (ftruncate(handles[h].fd, size)) return OUT_OF_MEMORY;
        live++; *out = 0x4000 + h; return OK;
    }
    return OUT_OF_MEMORY;
}
static int release(uint64_t handle) {
    int h = handle - 0x4000;
    if (h < 1 || h >= MOST || !handles[h].fd || handles[h].released) return INVALID_VALUE;
    handles[h].released = 1; drop(h); return OK;
}
static int map_at(uint64_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    int h = handle - 0x4000;
    if (h < 1 || h >= MOST || !handles[h].fd || size != GRANULE || offset || flags || at % GRANULE) return INVALID_VALUE;
    if (at < reserved_at || at + size > reserved_at + reserved_size || find(at) >= 0) return INVALID_VALUE;
    if (mappings++ == fail_map_at) return 999;
    int i = find(0);
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[h].fd, 0) == MAP_FAILED) return 999;
    mapped[i].at = at; mapped[i].handle = h; mapped[i].readable = 0; handles[h].maps++; return OK;
}
static int unmap_at(uint64_t at, size_t size) {
    int i = find(at);
    if (i < 0 || size != GRANULE) return INVALID_VALUE;
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    handles[mapped[i].handle].maps--; drop(mapped[i].handle); mapped[i].at = 0; return OK;
}
static int set_access(uint64_t at, size_t size, const access_t *d, size_t count) {
    if (!d || count != 1 || d->flags != 3 || d->location.type != 1 || d->location.id != current || size % GRANULE) return INVALID_VALUE;
    for (uint64_t a = at; a < at + size; a += GRANULE) if (find(a) < 0) return INVALID_VALUE;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
static int info(size_t *free_bytes, size_t *total) {
    if (ready()) return NOT_INITIALIZED;
    *total = stand_in_room; *free_bytes = stand_in_room - live * GRANULE; return OK;
}

#ifdef CUDA
int cuInit(unsigned flags) { if (flags) return INVALID_VALUE; initialized = 1; return OK; }
int cuDeviceGet(int *out, int i) { if (!initialized) return NOT_INITIALIZED; if (i > 1) return INVALID_DEVICE; *out = i; return OK; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = (void *)(0x100ul + device); return OK; }
int cuCtxSetCurrent(void *context) { current = (int)((uint64_t)context - 0x100); return OK; }
int cuCtxSynchronize(void) { return ready(); }
int cuDeviceGetUuid(unsigned char *out, int device) { for (int i = 0; i < 16; i++) out[i] = 16 * device + i; return OK; }
int cuGetErrorString(int e, const char **out) { *out = e == OUT_OF_MEMORY ? "out of memory" : "invalid argument"; return OK; }
int cuMemGetAllocationGranularity(size_t *o, const prop_t *p, int f) { return granularity(o, p, f); }
int cuMemAddressReserve(uint64_t *o, size_t s, size_t a, uint64_t h, unsigned long long f) { return reserve(o, s, a, h, f); }
int cuMemAddressFree(uint64_t a, size_t s) { return address_free(a, s); }
int cuMemCreate(uint64_t *o, size_t s, const prop_t *p, unsigned long long f) { return create(o, s, p, f); }
int cuMemRelease(uint64_t h) { return release(h); }
int cuMemMap(uint64_t a, size_t s, size_t o, uint64_t h, unsigned long long f) { return map_at(a, s, o, h, f); }
int cuMemUnmap(uint64_t a, size_t s) { return unmap_at(a, s); }
int cuMemSetAccess(uint64_t a, size_t s, const access_t *d, size_t n) { return set_access(a, s, d, n); }
int cuMemGetInfo_v2(size_t *f, size_t *t) { return info(f, t); }
#else
int hipSetDevice(int device) { if (device > 1) return INVALID_DEVICE; current = device; return OK; }
int hipDeviceSynchronize(void) { return ready(); }
int hipDeviceGetUuid(void *out, int device) { memcpy(out, device ? "9b07c5e3d81f0001" : "9b07c5e3d81f0000", 16); return OK; }
const char *hipGetErrorString(int e) { return e == OUT_OF_MEMORY ? "out of memory" : "invalid argument"; }
int hipMemGetAllocationGranularity(size_t *o, const prop_t *p, int f) { return granularity(o, p, f); }
int hipMemAddressReserve(void **o, size_t s, size_t a, void *h, unsigned long long f) { return reserve((uint64_t *)o, s, a, (uint64_t)h, f); }
int hipMemAddressFree(void *a, size_t s) { return address_free((uint64_t)a, s); }
int hipMemCreate(void **o, size_t s, const prop_t *p, unsigned long long f) { return create((uint64_t *)o, s, p, f); }
int hipMemRelease(void *h) { return release((uint64_t)h); }
int hipMemMap(void *a, size_t s, size_t o, void *h, unsigned long long f) { return map_at((uint64_t)a, s, o, (uint64_t)h, f); }
int hipMemUnmap(void *a, size_t s) { return unmap_at((uint64_t)a, s); }
int hipMemSetAccess(void *a, size_t s, const access_t *d, size_t n) { return set_access((uint64_t)a, s, d, n); }
int hipMemGetInfo(size_t *f, size_t *t) { return info(f, t); }
#endif
