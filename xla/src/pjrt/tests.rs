//! Tests with a plugin, which the oracle names in `ALTIPLANO_PJRT_PLUGIN`, and of errors without one.

use super::*;

#[test]
fn bad_plugins_are_refused_by_name() {
    let said = |path: &std::path::Path| Plugin::open(path).expect_err("no plugin").to_string();
    let missing = std::path::Path::new("no/such/plugin.so");
    assert_eq!(said(missing), "no/such/plugin.so: cannot be opened as a PJRT plugin: there is no such file");
    let text = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    assert!(said(&text).contains("Cargo.toml: cannot be opened as a PJRT plugin: "), "{}", said(&text));
}
