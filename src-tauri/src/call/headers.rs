//! Which headers concern one hop or one exchange only, and so are not passed on or not shared.

use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, TRANSFER_ENCODING};

/// Takes off what RFC 9110 (7.6.1) makes a matter of one connection, in either direction.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages name nothing in `connection` but `keep-alive` or `close`.
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    if headers.contains_key(TRANSFER_ENCODING) {
        // A length beside it is not the body's (RFC 9112, 6.3).
        headers.remove(CONTENT_LENGTH);
    }
    let fixed: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_hop_by_hop(name.as_str()))
        .cloned()
        .collect();
    for name in fixed {
        headers.remove(name);
    }
}

fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-authentication-info"
    )
}

/// Headers that tell of one exchange: whoever gets a shared or kept answer does not get them.
pub fn remove_exchange(headers: &mut HeaderMap) {
    let own: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_of_one_exchange(name.as_str()))
        .cloned()
        .collect();
    for name in own {
        headers.remove(name);
    }
}

fn is_of_one_exchange(name: &str) -> bool {
    matches!(name, "date" | "set-cookie" | "age")
        || name.starts_with("x-ratelimit-")
        || name.starts_with("ratelimit")
        || name.starts_with("anthropic-ratelimit-")
}

/// Takes the provider's words on which web pages may read the answer off: those are about its own
/// site, and ours are set in their place.
pub fn remove_cors(headers: &mut HeaderMap) {
    let cors: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with("access-control-"))
        .cloned()
        .collect();
    for name in cors {
        headers.remove(name);
    }
}
