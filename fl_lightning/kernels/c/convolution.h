/* What convolutions work on: images (height, width, channels), and weights as PyTorch has them,
 * (out, in, kernel height, kernel width). */

#ifndef FL_LIGHTNING_CONVOLUTION_H
#define FL_LIGHTNING_CONVOLUTION_H

typedef struct {
    long in, out;         /* channels */
    long height, width;   /* of an image, any padding included */
    long tall, wide;      /* of the kernel */
} shape;

#endif
