//! Coordination of processes, in one thread, over a simulated network, directory and clock. A seed draws hosts, latencies,
//! strangers and faults; each run is checked for rules that hold whatever happens.

mod network;
mod rendezvous;
mod watch;
