//! What a check found: findings that each name the culprit, gathered into one report and one error.

use std::fmt;

use serde::Serialize;

use crate::error::{Error, Result};

/// Findings an error spells out; the report keeps them all.
const SHOWN: usize = 8;

/// One broken promise: where, what was expected, what was found, what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Invariant, a row of [`ALL`](super::id::ALL).
    pub id: &'static str,
    /// Node of the device's graph, in recording order.
    pub node: Option<u32>,
    /// Label of the chain op, e.g. `layer3.score`; empty where no op is concerned.
    pub op: String,
    /// Field of the op's argument struct.
    pub field: Option<&'static str>,
    /// Buffer of the plan.
    pub buffer: Option<String>,
    /// What should be there.
    pub expected: String,
    /// What is there.
    pub found: String,
    /// What to change or look at.
    pub help: &'static str,
}

impl Finding {
    /// A finding about nothing in particular yet; the other methods say where.
    pub fn new(id: &'static str, expected: impl Into<String>, found: impl Into<String>, help: &'static str) -> Finding {
        let (expected, found) = (expected.into(), found.into());
        Finding { id, node: None, op: String::new(), field: None, buffer: None, expected, found, help }
    }

    /// Names the node and its op.
    pub fn at(mut self, node: u32, op: &str) -> Finding {
        (self.node, self.op) = (Some(node), op.to_owned());
        self
    }

    /// Names the argument.
    pub fn field(mut self, field: &'static str) -> Finding {
        self.field = Some(field);
        self
    }

    /// Names the buffer.
    pub fn buffer(mut self, buffer: impl Into<String>) -> Finding {
        self.buffer = Some(buffer.into());
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { id, node, op, field, buffer, expected, found, .. } = self;
        f.write_str(id)?;
        if let Some(node) = node {
            write!(f, " node {node}")?;
        }
        if !op.is_empty() {
            write!(f, " {op}")?;
        }
        if let Some(field) = field {
            write!(f, ".{field}")?;
        }
        if let Some(buffer) = buffer {
            write!(f, " (buffer {buffer})")?;
        }
        write!(f, ": expected {expected}, found {found}")
    }
}

/// Everything one audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was looked at, e.g. a graph's key.
    pub subject: String,
    /// What is broken, in the order it was found.
    pub findings: Vec<Finding>,
}

impl Report {
    /// An empty report about `subject`.
    pub fn new(subject: impl Into<String>) -> Report {
        Report { subject: subject.into(), findings: Vec::new() }
    }

    /// Adds a finding.
    pub fn push(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// A check could not look: it has failed.
    pub fn query_failed(&mut self, id: &'static str, query: &str, error: &Error) {
        let help = "a check that cannot look has failed: report the device and driver version";
        self.push(Finding::new(id, format!("an answer to {query}"), format!("the error {error}"), help));
    }

    /// True if nothing was found.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Takes over another report's findings.
    pub fn absorb(&mut self, other: Report) {
        self.findings.extend(other.findings);
    }

    /// An error of the first finding's invariant that spells the findings out; `Ok` if there are none.
    pub fn into_result(self) -> Result<()> {
        let Some(first) = self.findings.first() else { return Ok(()) };
        let (id, help) = (first.id, first.help);
        Err(Error::invariant(id, self.to_string()).help(help))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.findings.len();
        write!(f, "{}: {count} finding{}", self.subject, if count == 1 { "" } else { "s" })?;
        for finding in self.findings.iter().take(SHOWN) {
            write!(f, "\n  {finding}")?;
        }
        if count > SHOWN {
            write!(f, "\n  and {} more", count - SHOWN)?;
        }
        Ok(())
    }
}
