#ifndef FL_LIGHTNING_CONVOLUTION_SHAPE_H
#define FL_LIGHTNING_CONVOLUTION_SHAPE_H

typedef struct {
    long in, out;         /* channels */
    long height, width;   /* of an image, any padding included */
    long tall, wide;      /* of the kernel */
} shape;

#endif
