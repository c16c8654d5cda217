/* Many processes allocate by every class while some of them are killed and some stopped, at random moments.
 *
 * usage: storm LIBCUDA PROCESSES KILLS SEED
 * Prints what happened as JSON. The processes end by SIGKILL alone; at the end all of them do. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "holdings.h"

#define MOST 4096

struct tally { /* shared by all processes */
    uint64_t granted[CLASSES], refused[CLASSES], contexts, contexts_refused, errors;
    uint64_t steps, allowed; /* so much per kill, however slow the machine is */
    int first_error, first_class;
};
static struct tally *tally;

static void rest(uint32_t most_us) {
    usleep(dice(most_us)); /* hundreds share a few processors: the killer must get its turn, too */
    while (__atomic_fetch_add(&tally->steps, 1, __ATOMIC_RELAXED) >= __atomic_load_n(&tally->allowed, __ATOMIC_RELAXED)) {
        __atomic_fetch_sub(&tally->steps, 1, __ATOMIC_RELAXED);
        usleep(20000 + dice(40000));
    }
}

static void note(CUresult result, int class, uint64_t *granted, uint64_t *refused) {
    if (result == CUDA_SUCCESS) {
        __atomic_fetch_add(granted, 1, __ATOMIC_RELAXED);
    } else if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        __atomic_fetch_add(refused, 1, __ATOMIC_RELAXED);
    } else if (__atomic_fetch_add(&tally->errors, 1, __ATOMIC_RELAXED) == 0) {
        tally->first_error = (int)result;
        tally->first_class = class;
    }
}

static void tenant(const char *path) {
    struct holding holdings[HOLDINGS] = {0};
    CUcontext context;
    CUresult result;
    driver = dlopen(path, RTLD_NOW);
    if (driver == NULL || CALL(cuInit)(0) != CUDA_SUCCESS) {
        note(CUDA_ERROR_UNKNOWN, CLASSES, NULL, NULL);
        pause();
    }
    while ((result = CALL(cuDevicePrimaryCtxRetain)(&context, 0)) != CUDA_SUCCESS) {
        note(result, CLASSES, &tally->contexts, &tally->contexts_refused);
        rest(50000);
    }
    note(result, CLASSES, &tally->contexts, NULL);
    CALL(cuCtxSetCurrent)(context);
    for (;;) {
        struct holding *holding = &holdings[dice(HOLDINGS)];
        if (exchange(holding, &result)) {
            note(result, holding->class, &tally->granted[holding->class], &tally->refused[holding->class]);
        }
        rest(150000);
    }
}

static pid_t begin(const char *path, unsigned number) {
    pid_t pid = fork();
    if (pid == 0) {
        seed = number;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        tenant(path);
    }
    return pid;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void end(pid_t pid) {
    kill(pid, SIGKILL); /* ends a stopped one, too */
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
    }
}

int main(int argc, char **argv) {
    static pid_t pids[MOST];
    static int64_t wakes[MOST];
    unsigned count = argc == 5 ? (unsigned)atoi(argv[2]) : 0, kills = 0, stops = 0;
    if (count == 0 || count > MOST) {
        fprintf(stderr, "usage: storm LIBCUDA PROCESSES KILLS SEED\n");
        return 2;
    }
    tally = mmap(NULL, sizeof(*tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    seed = (unsigned)atoi(argv[4]);
    tally->allowed = 10 * count;
    for (unsigned number = 0; number < count; number++) {
        pids[number] = begin(argv[1], seed + number + 1);
    }
    unsigned wanted = (unsigned)atoi(argv[3]);
    for (unsigned round = 0; kills < wanted; round++) {
        unsigned victim = dice(count);
        if (dice(3) == 0 && wakes[victim] == 0) {
            kill(pids[victim], SIGSTOP);
            wakes[victim] = now_ms() + 5 + dice(60);
            stops++;
        } else {
            end(pids[victim]);
            wakes[victim] = 0;
            pids[victim] = begin(argv[1], seed + count + round + 1);
            kills++;
        }
        for (unsigned number = 0; number < count; number++) {
            if (wakes[number] != 0 && wakes[number] <= now_ms()) {
                kill(pids[number], SIGCONT);
                wakes[number] = 0;
            }
        }
        __atomic_fetch_add(&tally->allowed, 60, __ATOMIC_RELAXED);
        usleep(dice(20000));
    }
    for (unsigned number = 0; number < count; number++) {
        end(pids[number]);
    }
    printf("{\"kills\": %u, \"stops\": %u, \"contexts\": %llu, \"errors\": %llu, \"first_error\": [%d, %d], \"classes\": {", kills,
           stops, (unsigned long long)tally->contexts, (unsigned long long)tally->errors, tally->first_error, tally->first_class);
    for (int class = 0; class < CLASSES; class++) {
        printf("%s\"%s\": [%llu, %llu]", class > 0 ? ", " : "", names[class], (unsigned long long)tally->granted[class],
               (unsigned long long)tally->refused[class]);
    }
    printf("}}\n");
    return 0;
}
