//! State that is in host memory: when the update of a stage loads that of each of its parameters, so that copies go on while
//! parameters are updated and a device never holds more of it than a bounded part.
//!
//! States go through a window of two and a half times the largest of them: one is loaded as soon as those that the window cannot hold
//! beside it are back in the host. Of states of one size that is double buffering, with room for small ones between them so that the
//! link is busy both ways; of many small ones more are under way at once.

/// The window through which states of so many bytes go, in the order in which their parameters are updated.
pub struct Window {
    /// Of each, how many of the first have to be back before it is loaded.
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

    /// Whether the `i`-th is loaded before the `now`-th is updated, if it is not there yet.
    pub fn is_due(&self, i: usize, now: usize) -> bool {
        self.after.get(i).is_some_and(|&after| after <= now)
    }

    /// The last of those that have to be back before the `i`-th is loaded.
    pub fn waits_for(&self, i: usize) -> Option<usize> {
        self.after.get(i)?.checked_sub(1)
    }
}

/// Bytes that are on the device at once, at most.
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
        /// Loaded as soon as they are due, states are there in time and never more of them than there is room for.
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
                // One ahead, wherever there is one.
                prop_assert!(next > now + 1 || now + 1 == bytes.len());
            }
        }
    }
}
