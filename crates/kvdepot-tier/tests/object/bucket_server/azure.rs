//! Requests of Azure Blob Storage.

use std::collections::BTreeMap;

use super::{Bucket, Object, Request, Response};

fn tag(version: u64) -> String {
    format!("\"0x{version:X}\"")
}

pub(super) fn serve(bucket: &mut Bucket, request: &Request, name: &str, is_blind: bool) -> Response {
    let comp = request.query.get("comp").map(String::as_str);
    match (request.method.as_str(), comp) {
        ("PUT", Some("block")) => {
            let id = request.query["blockid"].clone();
            bucket.uploads.entry(name.to_owned()).or_default().insert(id, request.body.clone());
            Response::new(201, String::new()).with("ETag", "\"part\"")
        }
        ("PUT", Some("blocklist")) => complete(bucket, request, name),
        ("PUT", None) => put(bucket, request, name, is_blind),
        ("POST", Some("batch")) => delete_many(bucket, request),
        ("GET", Some("list")) => list(bucket, request),
        ("GET" | "HEAD", None) => match bucket.objects.get(name) {
            Some(object) => Response { body: object.bytes.clone(), ..Response::new(200, String::new()) }
                .with("ETag", tag(object.version)),
            None => Response::error(404, "BlobNotFound").with("x-ms-error-code", "BlobNotFound"),
        },
        _ => Response::new(405, String::new()),
    }
}

fn stored(bucket: &mut Bucket, name: &str, bytes: Vec<u8>) -> Response {
    // The parts of all writers are dropped with it.
    bucket.uploads.remove(name);
    let version = bucket.store(name, bytes);
    Response::new(201, String::new()).with("ETag", tag(version))
}

fn put(bucket: &mut Bucket, request: &Request, name: &str, is_blind: bool) -> Response {
    let there = bucket.objects.get(name).map(|object| tag(object.version));
    if !is_blind && request.headers.contains_key("if-none-match") && there.is_some() {
        return Response::error(409, "BlobAlreadyExists");
    }
    let wanted = request.headers.get("if-match");
    if !is_blind && wanted.is_some() && there.as_ref() != wanted {
        return Response::error(412, "ConditionNotMet");
    }
    if request.headers.get("x-ms-blob-type").map(String::as_str) != Some("BlockBlob") {
        return Response::error(400, "MissingRequiredHeader");
    }
    stored(bucket, name, request.body.clone())
}

fn complete(bucket: &mut Bucket, request: &Request, name: &str) -> Response {
    let text = String::from_utf8_lossy(&request.body).into_owned();
    let ids = text.split("<Uncommitted>").skip(1).filter_map(|part| part.split("</Uncommitted>").next());
    let nothing = BTreeMap::new();
    let parts = bucket.uploads.get(name).unwrap_or(&nothing);
    let parts: Option<Vec<Vec<u8>>> = ids.map(|id| parts.get(id).cloned()).collect();
    match parts {
        Some(parts) => stored(bucket, name, parts.concat()),
        None => Response::error(400, "InvalidBlockList"),
    }
}

/// Each part of the request is a request to delete one object, with an answer of its own.
fn delete_many(bucket: &mut Bucket, request: &Request) -> Response {
    let text = String::from_utf8_lossy(&request.body).into_owned();
    let targets = text.lines().filter_map(|line| line.strip_prefix("DELETE /")?.split_once(" HTTP"));
    let mut out = String::new();
    for (id, (target, _)) in targets.enumerate() {
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        let name = bucket.name_of(&format!("/{path}")).expect("an object of this container");
        let status = if bucket.objects.remove(&name).is_some() { "202 Accepted" } else { "404 Not Found" };
        out += &format!(
            "--batch\r\nContent-Type: application/http\r\nContent-ID: {id}\r\n\r\nHTTP/1.1 {status}\r\n\r\n\r\n"
        );
    }
    Response::new(202, out + "--batch--\r\n").with("Content-Type", "multipart/mixed; boundary=batch")
}

fn list(bucket: &Bucket, request: &Request) -> Response {
    let mut out = String::from("<EnumerationResults><Blobs>");
    let (directories, found) = bucket.below(request);
    for directory in directories {
        out += &format!("<BlobPrefix><Name>{directory}</Name></BlobPrefix>");
    }
    for (name, Object { bytes, version }) in found {
        out += &format!(
            "<Blob><Name>{name}</Name><Properties><Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified>\
             <Content-Length>{}</Content-Length><Content-Type>x</Content-Type><Etag>{}</Etag></Properties></Blob>",
            bytes.len(),
            tag(*version).replace('"', "&quot;")
        );
    }
    Response::new(200, out + "</Blobs><NextMarker/></EnumerationResults>")
}
