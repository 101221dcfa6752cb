// Codes of the element types of tensors, for the fields of a call that name a dtype.
#pragma once

enum { FA_FLOAT32 = 0, FA_BFLOAT16 = 1, FA_FLOAT16 = 2, FA_INT8 = 3, FA_FLOAT8 = 4 };
