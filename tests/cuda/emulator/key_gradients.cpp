// The library of one variant of the gradients of tokens with gates of key dimensions, chosen by a KeyGradientsConfig.
#include "key_gradients.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_key_gradients, fastattention_linear_key_gradients, GradientParams)
