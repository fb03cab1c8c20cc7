/* The driver's NVML library as far as kvtools asks it, for machines without an NVIDIA driver: built as libnvidia-ml.so.1 and
 * loaded by the real nvidia-ml-py package. Two boards: an H200 with all figures, and one in MIG mode that refuses most.
 * NVML_STANDIN_FAIL=init|count makes that call fail, as a driver does whose library and module do not match. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, MISMATCH = 18 };
struct memory { unsigned long long total, free, used; };
struct rates { unsigned int gpu, memory; };
struct pci { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; };

static int users;

static int fails(const char *call) {
    const char *wanted = getenv("NVML_STANDIN_FAIL");
    return wanted && strcmp(wanted, call) == 0;
}

static int board(void *device) { return (int)(long)device - 1; }

int nvmlInitWithFlags(unsigned int flags) { (void)flags; if (fails("init")) return MISMATCH; users++; return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { if (!users) return UNINITIALIZED; users--; return OK; }
const char *nvmlErrorString(int code) { return code == MISMATCH ? "Driver/library version mismatch" : "Not Supported"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    if (!users) return UNINITIALIZED;
    if (fails("count")) return MISMATCH;
    *count = 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index > 1) return INVALID;
    *device = (void *)(long)(index + 1);
    return OK;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    snprintf(name, length, "%s", board(device) ? "NVIDIA A100-SXM4-80GB" : "NVIDIA H200");
    return OK;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-0000000%d-1111-2222-3333-444444444444", board(device));
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%s:00.0", board(device) ? "A5" : "65");
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    if (board(device)) return NOT_SUPPORTED;
    memory->total = 141ULL << 30;
    memory->used = 37ULL << 30;
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, struct rates *rates) {
    if (board(device)) return NOT_SUPPORTED;
    rates->gpu = 63;
    rates->memory = 12;
    return OK;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    (void)device;
    if (sensor != 0) return INVALID;
    *celsius = 54;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    if (board(device)) return NOT_SUPPORTED;
    *milliwatts = 412500;
    return OK;
}
