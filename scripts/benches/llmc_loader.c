/* Times llm.c's own loader: PATTERN LANES LENGTH EQUAL TIMED. The first EQUAL batches go to standard
   output, inputs and targets; wall and processor seconds of TIMED batches to standard error. */
#include <time.h>
#include "llmc/dataloader.h"

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    int lanes = atoi(argv[2]), length = atoi(argv[3]), equal = atoi(argv[4]), timed = atoi(argv[5]);
    DataLoader loader;
    dataloader_init(&loader, argv[1], lanes, length, 0, 1, 0);
    for (int n = 0; n < timed; n++) { /* the shards' pages, too */
        dataloader_next_batch(&loader);
        if (n >= equal) continue;
        fwrite(loader.inputs, sizeof(int), lanes * length, stdout);
        fwrite(loader.targets, sizeof(int), lanes * length, stdout);
    }
    double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    for (int n = 0; n < timed; n++) dataloader_next_batch(&loader);
    wall = now(CLOCK_MONOTONIC) - wall;
    cpu = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    fprintf(stderr, "%.9f %.9f", wall, cpu);
    return 0;
}
