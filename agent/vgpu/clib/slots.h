/* What slots.c and sweep.c share. */
#ifndef GNA_SLOTS_H
#define GNA_SLOTS_H

#include "caps.h"

extern struct gna_usage_slot gna_process; /* who this process is */

bool gna_lock_slots(void);
unsigned gna_used_slots(void);
/* Slots are locked. What the slot had charged goes back, device by device, but for what others have open of it. */
bool gna_leave_slot(struct gna_usage_slot *slot);
/* When a process began, as field 22 of /proc/<pid>/stat; 0 when it cannot be read. `*gone`: a zombie. `*ending`: it may
 * still have its memory. */
uint64_t gna_start_of(uint32_t pid, bool *gone, bool *ending);
bool gna_is_dead(uint32_t pid, uint64_t start, uint64_t namespace, bool thorough);

/* Slots are locked; who looks at this one without that lock sees all of what was written before, or none. */
static inline void gna_set_state(struct gna_usage_slot *slot, uint32_t state) {
    __atomic_store_n(&slot->state, state, __ATOMIC_RELEASE);
}

#endif
