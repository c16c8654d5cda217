/* crowd DRIVER COUNT BYTES: that many processes, each of which has a context and that much memory until standard input
 * ends. Prints how many were given theirs. */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int call_t();

static void member(void *driver, size_t bytes, int answer) {
    uint64_t context = 0, memory = 0;
    char result = ((call_t *)dlsym(driver, "cuInit"))(0) == 0 &&
                  ((call_t *)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0) == 0 &&
                  ((call_t *)dlsym(driver, "cuCtxSetCurrent"))(context) == 0 &&
                  ((call_t *)dlsym(driver, "cuMemAlloc_v2"))(&memory, bytes) == 0;
    if (write(answer, &result, 1) == 1) {
        pause();
    }
    _exit(0);
}

int main(int argc, char **argv) {
    int count = argc == 4 ? atoi(argv[2]) : 0, ends[2], given = 0;
    void *driver = argc == 4 ? dlopen(argv[1], RTLD_NOW) : NULL;
    pid_t *pids = calloc((size_t)count + 1, sizeof(*pids));
    if (driver == NULL || pids == NULL || pipe(ends)) {
        return 2;
    }
    for (int number = 0; number < count; number++) {
        char result = 0;
        if ((pids[number] = fork()) == 0) {
            member(driver, strtoul(argv[3], NULL, 10), ends[1]);
        }
        given += read(ends[0], &result, 1) == 1 && result;
    }
    printf("%d\n", given);
    fflush(stdout);
    (void)!read(STDIN_FILENO, ends, 1);
    for (int number = 0; number < count; number++) {
        kill(pids[number], SIGKILL);
    }
    while (wait(NULL) > 0) {
    }
    return 0;
}
