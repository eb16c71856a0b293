//! Optimizer state in host memory: when a stage's update loads the state of each of its parameters. Copies overlap with
//! updates, and a device holds only a bounded part of the state.
//!
//! States pass through a window of two and a half times the largest of them. A state is loaded as soon as those that
//! the window cannot hold beside it are back in the host. For states of equal size this is double buffering, with room
//! for small ones in between so that the link is busy both ways. Of small states, more are in transit at once.

/// The window for states of the given bytes, in the order in which their parameters are updated.
pub struct Window {
    /// For each state, the number of first states that must be back before it is loaded.
    after: Vec<usize>,
}

impl Window {
    pub fn new(bytes: &[u64]) -> Window {
        let room = room(bytes);
        let (mut first, mut held) = (0, 0);
        let mut after = Vec::with_capacity(bytes.len());
        for &more in bytes {
            held += more;
            while held > room {
                held -= bytes[first];
                first += 1;
            }
            after.push(first);
        }
        Window { after }
    }

    /// Returns true if the `i`-th state is loaded before the `now`-th parameter is updated, unless it is there already.
    pub fn is_due(&self, i: usize, now: usize) -> bool {
        self.after.get(i).is_some_and(|&after| after <= now)
    }

    /// The last state that must be back before the `i`-th is loaded.
    pub fn waits_for(&self, i: usize) -> Option<usize> {
        self.after.get(i)?.checked_sub(1)
    }
}

/// Most bytes that are on the device at once.
fn room(bytes: &[u64]) -> u64 {
    let largest = bytes.iter().copied().max().unwrap_or(0);
    2 * largest + largest / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_states_are_double_buffered() {
        let window = Window::new(&[8; 5]);
        let waits: Vec<_> = (0..5).map(|i| window.waits_for(i)).collect();
        assert_eq!(waits, [None, None, Some(0), Some(1), Some(2)]);
    }

    #[test]
    fn small_states_are_loaded_further_ahead() {
        let window = Window::new(&[1, 1, 1, 9, 9, 1, 1, 9]);
        let waits: Vec<_> = (0..8).map(|i| window.waits_for(i)).collect();
        assert_eq!(waits, [None, None, None, None, None, None, Some(0), Some(3)]);
    }

    proptest! {
        /// States that are loaded as soon as they are due are there in time and never exceed the room.
        #[test]
        fn the_window_is_never_exceeded(bytes in proptest::collection::vec(0u64..50, 1..40)) {
            let window = Window::new(&bytes);
            let room = room(&bytes);
            let mut next = 0;
            for now in 0..bytes.len() {
                while next < bytes.len() && window.is_due(next, now) {
                    prop_assert!(window.waits_for(next).is_none_or(|back| back < now));
                    next += 1;
                }
                prop_assert!(next > now, "{now} is not there when it is updated");
                prop_assert!(bytes[now..next].iter().sum::<u64>() <= room);
                // At least one state is ahead, if there is one.
                prop_assert!(next > now + 1 || now + 1 == bytes.len());
            }
        }
    }
}
