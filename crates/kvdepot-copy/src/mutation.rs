//! Deliberate mistakes that tests plant in an engine, to check that the suite finds them. Other builds cannot have one.

use std::marker::PhantomData;

/// The mistake of an engine, one of `M`, if any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutation<M> {
    #[cfg(test)]
    mistake: Option<M>,
    kind: PhantomData<M>,
}

impl<M> Default for Mutation<M> {
    fn default() -> Self {
        Self {
            #[cfg(test)]
            mistake: None,
            kind: PhantomData,
        }
    }
}

impl<M: Copy + PartialEq> Mutation<M> {
    #[cfg(test)]
    pub(crate) const fn of(mistake: M) -> Self {
        Self { mistake: Some(mistake), kind: PhantomData }
    }

    #[cfg(test)]
    pub(crate) fn is(self, mistake: M) -> bool {
        self.mistake == Some(mistake)
    }

    #[cfg(not(test))]
    pub(crate) const fn is(self, _mistake: M) -> bool {
        false
    }
}
