/* Functions of CANN whose results torch_npu reads while it is imported; acl_stub.py adds all others, which return 0. */

#include <stdint.h>

int aclrtGetDeviceCount(uint32_t* count) {
    *count = 0;
    return 0;
}

const char* aclrtGetSocName(void) { return "Ascend910B3"; }

const char* aclGetRecentErrMsg(void) { return "no CANN: these are stubs"; }
