//! Names of the fields of a report.

use serde_json::Value;

/// Those that readers know.
pub(crate) fn known() -> Vec<&'static str> {
    include_str!("../bench-fields.txt").lines().collect()
}

/// Those of a report, each once: `a.b` for b inside of a, `[]` for lists.
pub(crate) fn of(value: &Value) -> Vec<String> {
    fn add(value: &Value, path: &str, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                for (name, inner) in map {
                    let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    found.push(path.clone());
                    add(inner, &path, found);
                }
            }
            Value::Array(list) => list.iter().for_each(|inner| add(inner, &format!("{path}[]"), found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    add(value, "", &mut found);
    found.sort();
    found.dedup();
    found
}
