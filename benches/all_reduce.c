/* MPI_Allreduce of f32 sums in place, as benches/all_reduce.rs measures that of workers: the median of rounds.
 *
 *     mpicc -O2 benches/all_reduce.c -o all_reduce && mpirun -n 2 ./all_reduce [MIB [ROUNDS]]
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int mib = argc > 1 ? atoi(argv[1]) : 64, rounds = argc > 2 ? atoi(argv[2]) : 15;
    int elements = mib << 18;
    float *tensor = calloc(elements, sizeof(float));
    double *taken = malloc(rounds * sizeof(double));
    for (int i = -1; i < rounds; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, tensor, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        if (i >= 0) taken[i] = MPI_Wtime() - start;
    }
    qsort(taken, rounds, sizeof(double), by_value);
    if (rank == 0) printf("MPI_Allreduce of %d MiB, %d ranks: %.2f ms\n", mib, ranks, 1e3 * taken[rounds / 2]);
    MPI_Finalize();
    return 0;
}
