/* Stubs of CANN for an NPU whose memory is the host's: enough for torch_npu to be imported, and to allocate, copy and free.
   Nothing is computed. Streams and events are addresses that are never dereferenced, and all work is done at once.
   acl_stub.py adds all other functions that torch_npu is linked to, which return 0. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 512  /* of an NPU's allocator */

static int allocate(void** memory, size_t bytes) {
    *memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    return *memory ? 0 : 1;
}

int aclrtMalloc(void** memory, size_t bytes, int policy) { return allocate(memory, bytes); }
int aclrtMallocAlign32(void** memory, size_t bytes, int policy) { return allocate(memory, bytes); }
int aclrtMallocHost(void** memory, size_t bytes) { return allocate(memory, bytes); }

int aclrtFree(void* memory) {
    free(memory);
    return 0;
}

int aclrtFreeHost(void* memory) { return aclrtFree(memory); }

int aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, int kind) {
    memmove(target, source, bytes);
    return 0;
}

int aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, int kind, void* stream) {
    return aclrtMemcpy(target, room, source, bytes, kind);
}

int aclrtGetMemInfo(int kind, size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = *total_bytes = (size_t)64 << 30; /* a 910B's */
    return 0;
}

int aclrtGetDeviceCount(uint32_t* count) {
    *count = 1;
    return 0;
}

int aclrtGetDevice(int32_t* device) {
    *device = 0;
    return 0;
}

int aclrtGetCurrentContext(void** context) {
    *context = (void*)1;
    return 0;
}

int aclrtCreateStream(void** stream) { return allocate(stream, 1); }
int aclrtCreateStreamWithConfig(void** stream, uint32_t priority, uint32_t flags) { return allocate(stream, 1); }
int aclrtDestroyStream(void* stream) { return aclrtFree(stream); }
int aclrtDestroyStreamForce(void* stream) { return aclrtFree(stream); }
int aclrtSynchronizeDevice(void) { return 0; }
int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) { return 0; }
int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t milliseconds) { return 0; }
int aclrtCreateEventExWithFlag(void** event, uint32_t flags) { return allocate(event, 1); }
int aclrtCreateEventWithFlag(void** event, uint32_t flags) { return allocate(event, 1); }
int aclrtDestroyEvent(void* event) { return aclrtFree(event); }

/* Settings. torch_npu looks some of them up by name. */
int aclSetCompileopt(int option, const char* value) { return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return 0; }
int aclrtSetDeviceSatMode(int mode) { return 0; }

int aclrtSetSysParamOpt(int option, int64_t value) { return 0; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return 0; }

int aclrtGetSysParamOpt(int option, int64_t* value) {
    *value = 0;
    return 0;
}

const char* aclrtGetSocName(void) { return "Ascend910B3"; }

const char* aclGetRecentErrMsg(void) { return "no CANN: these are stubs"; }
