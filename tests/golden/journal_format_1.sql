BEGIN TRANSACTION;
CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        epoch INTEGER NOT NULL,
        at_unix_ms INTEGER NOT NULL,
        kind TEXT NOT NULL,
        node_id TEXT NOT NULL,
        turn_id TEXT NOT NULL,
        terminal INTEGER NOT NULL,
        data TEXT NOT NULL,
        payload BLOB
    );
INSERT INTO "events" VALUES(1,1,1000000,'coordinator_started','','',0,'{"epoch":1,"pid":1,"at":1000.0}',NULL);
INSERT INTO "events" VALUES(2,1,1000000,'host_requested','host_000000ygj0yakn9edd1r','',0,'{"at":1000.0}',NULL);
INSERT INTO "events" VALUES(3,1,1000000,'host_ready','host_000000ygj0yakn9edd1r','',0,'{"pid":1,"machine":"here","at":1000.0}',NULL);
INSERT INTO "events" VALUES(4,1,1000000,'turn_accepted','turn_1','turn_1',0,'{"session_id":"s1","client_id":"client_1","surface":"python","deadline_at":1500.0,"at":1000.0}',NULL);
INSERT INTO "events" VALUES(5,1,1000000,'turn_started','turn_1','turn_1',0,'{"at":1000.0}',NULL);
INSERT INTO "events" VALUES(6,1,1000000,'run_accepted','run_2','turn_1',0,'{"parent_id":"turn_1","agent":"agent","client_id":"client_1","env_key":"env","retries":1,"retry_delay_s":1.0,"at":1000.0}',NULL);
INSERT INTO "events" VALUES(7,1,1000000,'run_accepted','run_3','turn_1',0,'{"parent_id":"turn_1","agent":"agent","client_id":"client_1","env_key":"env","retries":1,"retry_delay_s":1.0,"at":1000.0}',NULL);
INSERT INTO "events" VALUES(8,1,1000000,'run_accepted','run_4','turn_1',0,'{"parent_id":"turn_1","agent":"agent","client_id":"client_1","env_key":"env","retries":1,"retry_delay_s":1.0,"at":1000.0}',NULL);
INSERT INTO "events" VALUES(9,1,1000000,'run_started','run_2','turn_1',0,'{"host_id":"host_000000ygj0yakn9edd1r","at":1000.0}',NULL);
INSERT INTO "events" VALUES(10,1,1000000,'run_started','run_3','turn_1',0,'{"host_id":"host_000000ygj0yakn9edd1r","at":1000.0}',NULL);
INSERT INTO "events" VALUES(11,1,1000000,'run_started','run_4','turn_1',0,'{"host_id":"host_000000ygj0yakn9edd1r","at":1000.0}',NULL);
INSERT INTO "events" VALUES(12,1,1000000,'host_requested','host_000000ygj0cm9gk9w39q','',0,'{"at":1000.0}',NULL);
INSERT INTO "events" VALUES(13,1,1000000,'host_ready','host_000000ygj0cm9gk9w39q','',0,'{"pid":1,"machine":"here","at":1000.0}',NULL);
INSERT INTO "events" VALUES(14,1,1000000,'run_accepted','run_5','turn_1',0,'{"parent_id":"turn_1","agent":"agent","client_id":"client_1","env_key":"env","after":["run_4"],"at":1000.0}',NULL);
INSERT INTO "events" VALUES(15,1,1000000,'claim_changed','run_4','turn_1',0,'{"change":{"event":"granted","seq":1,"ticket":1,"claim_id":"claim_6","owner":"run_4","at":1000.0,"request":{"claim_id":"claim_6","owner":"run_4","areas":[{"mode":"write","path":"src/a.py"}],"ancestors":["turn_1"],"at":1000.0,"wait":true},"ahead_of":[]},"at":1000.0}',NULL);
INSERT INTO "events" VALUES(16,1,1000000,'attempt_ended','run_2','turn_1',0,'{"retry_at":1001.0,"at":1000.0}',NULL);
INSERT INTO "events" VALUES(17,1,1000000,'run_waiting','run_3','turn_1',0,'{"on":["run_2"],"at":1000.0}',NULL);
INSERT INTO "events" VALUES(18,1,1001000,'run_started','run_2','turn_1',0,'{"attempt":2,"host_id":"host_000000ygj0yakn9edd1r","at":1001.0}',NULL);
INSERT INTO "events" VALUES(19,1,1002000,'run_resumed','run_3','turn_1',0,'{"at":1002.0}',NULL);
INSERT INTO "events" VALUES(20,1,1002000,'host_gone','host_000000ygj0yakn9edd1r','',0,'{"reason":"exit 1","at":1002.0}',NULL);
INSERT INTO "events" VALUES(21,1,1002000,'effect_uncertain','run_3','turn_1',0,'{"reason":"host lost","in_flight":["body on host_000000ygj0yakn9edd1r"],"at":1002.0}',NULL);
INSERT INTO "events" VALUES(22,1,1002000,'attempt_ended','run_3','turn_1',0,'{"report":"lost","error_type":"HostLost","error":"exit 1","retry_at":1003.0,"at":1002.0}',NULL);
INSERT INTO "events" VALUES(23,1,1002000,'effect_uncertain','run_4','turn_1',0,'{"reason":"host lost","in_flight":["body on host_000000ygj0yakn9edd1r"],"at":1002.0}',NULL);
INSERT INTO "events" VALUES(24,1,1002000,'claim_changed','run_4','turn_1',0,'{"change":{"event":"released","seq":2,"ticket":1,"claim_id":"claim_6","owner":"run_4","at":1002.0},"at":1002.0}',NULL);
INSERT INTO "events" VALUES(25,1,1002000,'attempt_ended','run_4','turn_1',0,'{"report":"lost","error_type":"HostLost","error":"exit 1","retry_at":1003.0,"at":1002.0}',NULL);
INSERT INTO "events" VALUES(26,1,1002000,'effect_uncertain','run_2','turn_1',0,'{"reason":"host lost","in_flight":["body on host_000000ygj0yakn9edd1r"],"at":1002.0}',NULL);
INSERT INTO "events" VALUES(27,1,1002000,'run_ended','run_2','turn_1',1,'{"outcome":"lost","error_type":"HostLost","error":"exit 1","attempt":2,"at":1002.0}',NULL);
INSERT INTO "events" VALUES(28,1,1003000,'run_started','run_3','turn_1',0,'{"attempt":2,"host_id":"host_000000ygj0cm9gk9w39q","at":1003.0}',NULL);
INSERT INTO "events" VALUES(29,2,1003000,'run_started','run_4','turn_1',0,'{"attempt":2,"host_id":"host_000000ygj0cm9gk9w39q","at":1003.0}',NULL);
INSERT INTO "events" VALUES(30,2,1003000,'host_requested','host_000000ykfr1he6ka792g','',0,'{"at":1003.0}',NULL);
INSERT INTO "events" VALUES(31,2,1003000,'host_ready','host_000000ykfr1he6ka792g','',0,'{"pid":1,"machine":"here","at":1003.0}',NULL);
INSERT INTO "events" VALUES(32,2,1004000,'run_ended','run_4','turn_1',1,'{"attempt":2,"at":1004.0}',NULL);
INSERT INTO "events" VALUES(33,2,1004000,'run_started','run_5','turn_1',0,'{"host_id":"host_000000ygj0cm9gk9w39q","at":1004.0}',NULL);
INSERT INTO "events" VALUES(34,2,1004000,'cancel_requested','turn_1','turn_1',0,'{"cause":{"kind":"user_interrupt","origin":"turn_1","actor":"","surface":"python","request_id":"req_12","at_unix_ms":1004000,"reason":"enough"},"request_id":"req_12","live":2,"at":1004.0}',NULL);
INSERT INTO "events" VALUES(35,2,1009000,'run_escalated','run_5','turn_1',0,'{"host_id":"host_000000ygj0cm9gk9w39q","step":"kill_host","at":1009.0}',NULL);
INSERT INTO "events" VALUES(36,2,1009000,'host_draining','host_000000ygj0cm9gk9w39q','',0,'{"reason":"run_5 did not stop within its grace","kill":true,"at":1009.0}',NULL);
INSERT INTO "events" VALUES(37,2,1009000,'turn_settling','turn_1','turn_1',0,'{"report":"unconfirmed","at":1009.0}',NULL);
INSERT INTO "events" VALUES(38,2,1009000,'host_gone','host_000000ygj0cm9gk9w39q','',0,'{"reason":"killed","expected":true,"at":1009.0}',NULL);
INSERT INTO "events" VALUES(39,2,1009000,'effect_uncertain','run_3','turn_1',0,'{"reason":"host lost","in_flight":["body on host_000000ygj0cm9gk9w39q"],"at":1009.0}',NULL);
INSERT INTO "events" VALUES(40,2,1009000,'run_ended','run_3','turn_1',1,'{"outcome":"cancelled","cause":{"kind":"user_interrupt","origin":"turn_1","actor":"","surface":"python","request_id":"req_12","at_unix_ms":1004000,"reason":"enough"},"error_type":"HostLost","error":"killed","attempt":2,"at":1009.0}',NULL);
INSERT INTO "events" VALUES(41,2,1009000,'effect_uncertain','run_5','turn_1',0,'{"reason":"host lost","in_flight":["body on host_000000ygj0cm9gk9w39q"],"at":1009.0}',NULL);
INSERT INTO "events" VALUES(42,2,1009000,'run_ended','run_5','turn_1',1,'{"outcome":"cancelled","cause":{"kind":"user_interrupt","origin":"turn_1","actor":"","surface":"python","request_id":"req_12","at_unix_ms":1004000,"reason":"enough"},"error_type":"HostLost","error":"killed","attempt":1,"at":1009.0}',NULL);
INSERT INTO "events" VALUES(43,2,1009000,'turn_ended','turn_1','turn_1',1,'{"outcome":"cancelled","cause":{"kind":"user_interrupt","origin":"turn_1","actor":"","surface":"python","request_id":"req_12","at_unix_ms":1004000,"reason":"enough"},"at":1009.0}',NULL);
INSERT INTO "events" VALUES(44,2,1009000,'cancel_quiet','turn_1','turn_1',0,'{"request_id":"req_12","seconds":5.0,"at":1009.0}',NULL);
INSERT INTO "events" VALUES(45,2,1064000,'turn_accepted','turn_13','turn_13',0,'{"session_id":"s2","client_id":"client_1","surface":"python","at":1064.0}',NULL);
INSERT INTO "events" VALUES(46,2,1064000,'turn_started','turn_13','turn_13',0,'{"at":1064.0}',NULL);
INSERT INTO "events" VALUES(47,2,1064000,'run_accepted','run_14','turn_13',0,'{"parent_id":"turn_13","agent":"agent","client_id":"client_1","env_key":"env","at":1064.0}',NULL);
INSERT INTO "events" VALUES(48,2,1064000,'run_started','run_14','turn_13',0,'{"host_id":"host_000000ykfr1he6ka792g","at":1064.0}',NULL);
INSERT INTO "events" VALUES(49,2,1064000,'host_requested','host_0000010f20t8zg98pbsk','',0,'{"at":1064.0}',NULL);
INSERT INTO "events" VALUES(50,2,1064000,'host_ready','host_0000010f20t8zg98pbsk','',0,'{"pid":1,"machine":"here","at":1064.0}',NULL);
INSERT INTO "events" VALUES(51,2,1064000,'run_ended','run_14','turn_13',1,'{"attempt":1,"at":1064.0}',X'80044B052E');
INSERT INTO "events" VALUES(52,2,1064000,'turn_settling','turn_13','turn_13',0,'{"at":1064.0}',NULL);
INSERT INTO "events" VALUES(53,2,1064000,'turn_ended','turn_13','turn_13',1,'{"at":1064.0}',NULL);
INSERT INTO "events" VALUES(54,2,1064000,'turn_accepted','turn_16','turn_16',0,'{"session_id":"s3","client_id":"client_1","surface":"python","at":1064.0}',NULL);
INSERT INTO "events" VALUES(55,2,1064000,'turn_started','turn_16','turn_16',0,'{"at":1064.0}',NULL);
INSERT INTO "events" VALUES(56,2,1064000,'run_accepted','run_17','turn_16',0,'{"parent_id":"turn_16","agent":"agent","client_id":"client_1","env_key":"env","detached":true,"at":1064.0}',NULL);
INSERT INTO "events" VALUES(57,2,1064000,'run_started','run_17','turn_16',0,'{"host_id":"host_000000ykfr1he6ka792g","at":1064.0}',NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('epoch','2');
INSERT INTO "meta" VALUES('format_version','1');
CREATE UNIQUE INDEX events_one_end ON events (node_id) WHERE terminal = 1;
CREATE INDEX events_node ON events (node_id);
CREATE INDEX events_turn ON events (turn_id);
COMMIT;
