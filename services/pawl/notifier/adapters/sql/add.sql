-- Puts drafts into their inboxes. What is there already takes no number.
--
-- The counter rows are locked in one order, so that replicas do not deadlock. A
-- draft that another replica adds at the same moment violates the unique key
-- here, and the whole statement has no effect.
WITH draft AS (
    SELECT DISTINCT ON (d.store_id, d.user_id, d.notification_id) d.*
    FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[],
        $7::text[], $8::text[], $9::text[], $10::timestamptz[]
    ) WITH ORDINALITY AS d (
        store_id, user_id, notification_id, kind, run_id, conversation_id,
        event_id, title, body, create_time, position
    )
    WHERE NOT EXISTS (
        SELECT FROM notifier.notifications AS n
        WHERE (n.store_id, n.user_id, n.notification_id) = (d.store_id, d.user_id, d.notification_id)
    )
    ORDER BY d.store_id, d.user_id, d.notification_id, d.position
),
counter AS (
    INSERT INTO notifier.inboxes AS i (store_id, user_id, last_number)
    SELECT store_id, user_id, count(*) FROM draft GROUP BY store_id, user_id ORDER BY store_id, user_id
    ON CONFLICT (store_id, user_id) DO UPDATE SET last_number = i.last_number + excluded.last_number
    RETURNING store_id, user_id, last_number
)
INSERT INTO notifier.notifications (
    store_id, user_id, number, notification_id, kind, run_id, conversation_id, event_id, title, body, create_time
)
SELECT
    draft.store_id,
    draft.user_id,
    counter.last_number + 1 - row_number() OVER (PARTITION BY draft.store_id, draft.user_id ORDER BY position DESC),
    notification_id, kind, run_id, conversation_id, event_id, title, body, create_time
FROM draft
JOIN counter USING (store_id, user_id)
