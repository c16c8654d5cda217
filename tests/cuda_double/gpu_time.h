/* The GPUs' time: gpu_time.c moves the work on, gpu_clock.c says when. */
#ifndef GPU_TIME_H
#define GPU_TIME_H

#include "double.h"

/* --- gpu_clock.c: for streams and events ---------------------------------------------------------------- */
int time_on(void); /* whether the machine has a clock of its own; otherwise streams keep real time */
uint64_t time_now(void);
/* Work of `nanoseconds` at the end of a stream; `stamp`, if there is one, gets the instant at which it is done. */
void time_push(struct stream *stream, uint64_t nanoseconds, uint32_t stamp, int copies);
/* A stamp for an event that was not there before; what is on its way to it under an older number is forgotten. */
uint32_t time_stamp(uint32_t stamp);
void time_stamp_free(uint32_t stamp);
uint64_t time_stamped(uint32_t stamp); /* 0: not yet */
void time_stream_gone(const struct stream *stream);
int time_idle(const struct stream *stream);
void time_wait_stream(const struct stream *stream);
void time_wait_stamp(uint32_t stamp);
void time_wait_device(uint32_t device);

struct sim_cuda_clock *time_clock(void);
void time_lock(struct sim_cuda_clock *clock);
void time_unlock(struct sim_cuda_clock *clock);

/* --- gpu_tasks.c ----------------------------------------------------------------------------------------- */
void time_join(struct sim_cuda_clock *clock); /* this thread takes part in virtual time, until it ends */
/* Lets others run until the instant, or until a lane has got to the target. */
void time_pass_turn(struct sim_cuda_clock *clock, uint64_t until, uint32_t lane, uint64_t target);

/* --- gpu_time.c: the clock's lock is held ----------------------------------------------------------------- */
uint32_t lane_make(uint32_t slot, uint32_t device); /* number plus one; 0: none is free */
uint64_t device_next(uint32_t device);              /* the next instant at which something ends; UINT64_MAX: never */
void device_advance(uint32_t device, uint64_t to);
void slot_ended(uint32_t slot);

#endif
