-- Documents for the model to read and search. The owner is a user, or empty: then the document is the whole store's.
CREATE TABLE documents (
    store_id    text NOT NULL,
    owner_id    text NOT NULL,
    name        text NOT NULL COLLATE "C",
    -- A text search configuration. As text, because the number of one is another in every database.
    language    text NOT NULL,
    text_bytes  integer NOT NULL,
    text_sha256 text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, owner_id, name)
);

-- Their texts. One search vector cannot hold every text of the largest size, and a part says where a hit is.
CREATE TABLE document_parts (
    store_id    text NOT NULL,
    owner_id    text NOT NULL,
    name        text NOT NULL COLLATE "C",
    number      integer NOT NULL,
    byte_offset integer NOT NULL,
    content     text NOT NULL,
    language    text NOT NULL,
    -- Has a word for the owner too, so that a search does not read what others have.
    search      tsvector NOT NULL,
    PRIMARY KEY (store_id, owner_id, name, number),
    FOREIGN KEY (store_id, owner_id, name) REFERENCES documents ON DELETE CASCADE
);

CREATE INDEX document_parts_search ON document_parts USING gin (search);
