// Convolutions with 3 x 3 kernels and step 1 by Winograd's minimal filtering F(2 x 2, 3 x 3).
//
// A tile of 2 x 2 results reads 4 x 4 inputs d. With the kernel g it is Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A, which has 16
// multiplications for each pair of channels where the sum over taps has 36 (Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks", 2015, section 4.1). Over all channels each of the 16 is a product of matrices. The
// transforms have only sums and halves, so that results are as exact as those of the sum over taps, whose sums are nine times as long.
//
// A kernel of k x 3 x 3 has k times as many channels: each tap of the first axis is a channel of its own, whose inputs are
// those of other planes.
#pragma once

#include "convolution/geometry.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Whether these functions can compute the convolution and take less time than a product over all taps.
bool winograd_pays(const Convolution& c);

void winograd_forward(
    const Threads& threads, const Convolution& c, const float* x, const float* w, const float* bias, float* y);

// The bias, of a transposed convolution, may be null.
void winograd_input_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* w, const float* bias, float* dx);

// db may be null.
void winograd_weight_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* x, float* dw, float* db);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
