//! Plans of calls, made once for each shape.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use crate::error::Result;

/// Plans by shape. Callers use few shapes, mostly the same one again; whoever uses many pays for making plans again.
pub(super) struct Plans<K, P> {
    /// The one that was asked for last: compared, not hashed.
    newest: Option<(K, Arc<P>)>,
    all: HashMap<K, Arc<P>>,
}

impl<K, P> Default for Plans<K, P> {
    fn default() -> Self {
        Self { newest: None, all: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash, P> Plans<K, P> {
    const MOST: usize = 64;

    pub(super) fn get(&mut self, key: &K, make: impl FnOnce(&K) -> Result<P>) -> Result<Arc<P>> {
        if let Some((newest, plan)) = &self.newest
            && newest == key
        {
            return Ok(plan.clone());
        }
        let plan = match self.all.get(key) {
            Some(plan) => plan.clone(),
            None => {
                let plan = Arc::new(make(key)?);
                if self.all.len() >= Self::MOST {
                    self.all.clear();
                }
                self.all.insert(*key, plan.clone());
                plan
            }
        };
        self.newest = Some((*key, plan.clone()));
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_plan_is_made_once() {
        let (mut plans, mut made) = (Plans::default(), 0);
        let mut get = |key: u32| {
            let plan = plans.get(&key, |&key| {
                made += 1;
                Ok(key * 2)
            });
            (*plan.unwrap(), made)
        };
        assert_eq!(
            [get(1), get(1), get(2), get(1), get(2), get(2)].map(|(plan, _)| plan),
            [2, 2, 4, 2, 4, 4]
        );
        assert_eq!(get(1), (2, 2));
        // Many shapes are forgotten again, and made again.
        for key in 0..200 {
            get(key);
        }
        let (plan, before) = get(0);
        assert_eq!((plan, before), (0, 201));
        assert_eq!(get(0), (0, 201));
        assert!(plans.all.len() <= Plans::<u32, u32>::MOST);
    }

    #[test]
    fn a_plan_that_can_not_be_made_leaves_nothing() {
        let mut plans = Plans::<u32, u32>::default();
        assert!(plans.get(&1, |_| Err(Error::invalid("shape", 1, "is bad"))).is_err());
        assert_eq!(*plans.get(&1, |_| Ok(7)).unwrap(), 7);
    }
}
