/*
 * Sleeps and reaps until it is told to end. Serves twice: as the sandbox program of every pod, and as process 1 of the
 * cluster's own pid namespace, where children of ended programs would otherwise stay as zombies.
 */
#include <signal.h>
#include <stddef.h>
#include <sys/wait.h>

int main(void)
{
    sigset_t wanted;
    int number;

    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    sigaddset(&wanted, SIGINT);
    sigaddset(&wanted, SIGTERM);
    sigprocmask(SIG_BLOCK, &wanted, NULL); /* process 1 gets only signals that it waits for or handles */
    for (;;) {
        if (sigwait(&wanted, &number) != 0)
            continue;
        if (number != SIGCHLD)
            return 0;
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
    }
}
